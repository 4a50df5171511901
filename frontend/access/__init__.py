"""API keys, the limits of each, and their names in logs and metrics."""
