"""The engine on one GPU."""
