"""KV index and cost function; pure."""
