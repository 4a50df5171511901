"""The cost of a handoff."""
