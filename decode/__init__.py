"""The decode role, and the local-or-remote policy."""
