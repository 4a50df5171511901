"""Server-sent events of JSON bodies."""

DONE = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    """Return JSON as one event."""
    return b"data: %b\n\n" % body
