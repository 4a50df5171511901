"""Parts of every process: addresses, discovery, the request plane, events, messages, errors."""
