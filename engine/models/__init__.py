"""Architectures as data: configuration, weights and the decoder that computes them."""
