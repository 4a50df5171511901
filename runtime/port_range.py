"""A range of ports as text: `31000-31099`, both ends included."""

MAX_PORT = 65_535


def ports_of(text: str) -> range:
    """Return the ports. Raise ValueError for text that is no range of ports."""
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise ValueError("must be FIRST-LAST, as in 31000-31099")
    if not 0 < int(first) <= int(last) <= MAX_PORT:
        raise ValueError(f"must be within 1-{MAX_PORT}, the lower port first")
    return range(int(first), int(last) + 1)


def checked_range(text: str | None) -> str | None:
    """Return `text`, a setting that may be left out. Raise ValueError as above."""
    if text is not None:
        ports_of(text)
    return text
