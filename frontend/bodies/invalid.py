"""Errors about a field of a request, which they name."""

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.printable import short


def invalid_field(field: str, reason: str) -> InvalidRequestError:
    """Return the error of a field; `reason` is the sentence after its name."""
    return InvalidRequestError(f"`{field}` {reason}", param=field)


def unsupported(field: str, value: str | None = None) -> InvalidRequestError:
    """Return the error for a field, or for one value of it, that has no support."""
    if value is None:
        return invalid_field(field, "is not supported")
    return invalid_field(field, f"is {short(value)!r}, which is not supported")
