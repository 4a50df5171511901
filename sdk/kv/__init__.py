"""KV events and load, published and followed."""
