"""A worker's HTTP server, its health checks, and the counts of its endpoints."""
