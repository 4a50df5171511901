"""The model and its machine, shared by both roles."""
