"""Tandem beside other engines."""
