"""Wire requests to the values of handlers, and back."""
