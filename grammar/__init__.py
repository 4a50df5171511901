"""Answers that follow a grammar: its compilation, and the tokens that it allows next."""
