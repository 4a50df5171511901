"""The prefill role."""
