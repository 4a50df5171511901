"""`tandem bench`: load against an OpenAI-compatible server."""
