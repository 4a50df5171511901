"""The processes that compute one model together, each with a share of its weights."""
