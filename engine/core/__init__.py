"""The engine, its thread, its first costs, and the seam to its runner."""
