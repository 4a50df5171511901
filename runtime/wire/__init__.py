"""Messages, the bounds of their fields, their decoding, and the names of KV blocks."""
