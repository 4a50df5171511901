"""Sequences, their blocks, and which of them a step computes. No tensors."""
