"""The models that can be served, their workers and all that follows them, from discovery."""
