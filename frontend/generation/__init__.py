"""From a checked body to the pieces of its answer: plan, workers, text."""
