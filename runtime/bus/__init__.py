"""NATS: the connection to it, and events that correctness does not depend on."""
