"""A chat as requests have it: messages, tools, constraints, and the objects of its answer."""
