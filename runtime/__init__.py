"""What every process needs: addresses, discovery, the request plane, events, messages, errors."""
