"""Builds the bundled model: its corpus and its training."""
