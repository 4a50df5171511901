"""HTTP/1 of the frontend: one connection, one request and its response."""
