"""One role in this process."""
