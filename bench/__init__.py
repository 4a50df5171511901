"""Load, sweeps, plots and their definitions."""
