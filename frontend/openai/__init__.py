"""OpenAI's requests, responses and event streams."""
