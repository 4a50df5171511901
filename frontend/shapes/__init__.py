"""From other shapes of a chat, and from any checked body, to a generation."""
