"""A process in its cluster: its node, its report, and the model files that it sends."""
