"""The two state machines of a handoff, and what travels between them. Pure."""
