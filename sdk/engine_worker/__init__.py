"""The worker around an engine: its life, and the way of a request through it."""
