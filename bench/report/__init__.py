"""Figures, targets, tables and documents: what every benchmark shares."""
