"""The model on its device: which code computes it, its memory, its runner."""
