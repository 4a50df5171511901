"""The files of the live page."""
