"""The stages of requests, and their spans in OpenTelemetry and in trace files."""
