"""An HTTP client that measures an OpenAI server."""
