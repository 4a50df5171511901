"""Workers: the runtime's face, endpoints, clients, models."""
