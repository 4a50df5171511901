"""One process: its life, log, metrics, progress and HTTP server."""
