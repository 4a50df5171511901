"""A cluster that runs: its status, its decisions explained, commands to its workers."""
