"""The worker process: the parts that a role stands on."""
