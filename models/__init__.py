"""The bundled model, the script that trained it, and random models of any shape."""
