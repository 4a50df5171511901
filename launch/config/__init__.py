"""The composed configuration, its sources, and its live part."""
