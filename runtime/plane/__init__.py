"""The request plane: framed streams over TCP between processes."""
