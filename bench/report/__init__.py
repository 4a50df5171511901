"""Figures, targets and tables that all benchmarks share."""
