"""The cost of the stack around a model."""
