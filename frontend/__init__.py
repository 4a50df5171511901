"""The OpenAI-compatible HTTP frontend; no torch."""
