"""Architectures as tables, and the sizes that a model's config.json gives them. No weights."""
