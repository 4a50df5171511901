"""Access to a frontend: API keys with limits and scopes, and the web pages that may call it."""
