"""The live page: its states, the changes that it may make, and the page itself."""
