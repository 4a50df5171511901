"""Weights from files, or random ones, into a model's tensors."""
