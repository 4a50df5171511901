"""Engines: their contract, and the worker around them."""
