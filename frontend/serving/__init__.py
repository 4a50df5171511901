"""The frontend's process: its server, the API of each path, and operators' paths."""
