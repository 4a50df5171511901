"""Decoders of transformers' modeling code, with Tandem's attention and products."""
