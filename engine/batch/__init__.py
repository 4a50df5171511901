"""The batch rows of a step: packed on the host, and uploaded."""
