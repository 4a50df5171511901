"""The parts of a request that its answer leaves out of account."""

from tandem.frontend.bodies.invalid import unsupported
from tandem.runtime.printable import one_line, short

_MAX_NAMED = 16
_MAX_FIELD_BYTES = 96


class Ignored:
    """Fields of one request, for its response header and the log.

    With `is_refused` a field that is left out is an error instead.
    """

    __slots__ = ("_fields", "_num_more", "is_refused")

    def __init__(self, *, is_refused: bool = False) -> None:
        self.is_refused = is_refused
        self._fields: dict[str, None] = {}
        self._num_more = 0

    def add(self, field: str, value: str | None = None) -> None:
        """Leave a field out, or one value of it. Raises InvalidRequestError where it is refused."""
        if self.is_refused:
            raise unsupported(field, value)
        self.note(field if value is None else f"{field} {short(value)!r}")

    def note(self, field: str) -> None:
        """Leave a field out that may be left out by another option."""
        field = one_line(field, _MAX_FIELD_BYTES)
        if field in self._fields:
            return
        if len(self._fields) < _MAX_NAMED:
            self._fields[field] = None
        else:
            self._num_more += 1

    def __str__(self) -> str:
        if not self._fields:  # as in most requests
            return ""
        more = f", and {self._num_more} more" if self._num_more else ""
        return ", ".join(self._fields) + more
