"""Who may make a request, and how many: API keys with limits and scopes, and web pages."""
