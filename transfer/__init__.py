"""Moving KV: layout arithmetic, transports, the handoff state machine, checksums."""
