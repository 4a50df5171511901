"""The first minutes on a GPU: every assumption that no other machine can test."""
