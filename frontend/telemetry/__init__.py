"""Metrics, the log line and the trace of each request."""
