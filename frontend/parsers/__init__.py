"""Parsers of output formats: from the text of a model to pieces of an answer."""
