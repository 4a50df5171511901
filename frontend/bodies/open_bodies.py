"""The memory of request bodies that are being read, under one limit for all of them."""

from tandem.frontend.openai.errors import TooManyRequestsError

_FREE_BYTES = 16 * 1024  # of each body, so that a small request never waits for large ones


class OpenBodies:
    """The bytes of all bodies that are being read or turned into prompts."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes, or fewer. Raises TooManyRequestsError if that is over the limit."""
        if num_bytes > 0 and self._num_bytes + num_bytes > self._max_bytes:
            raise TooManyRequestsError(
                f"the frontend holds {self._max_bytes} bytes of unfinished bodies, and no more"
            )
        self._num_bytes += num_bytes


class BodyShare:
    """The bytes of one body among the open bodies."""

    __slots__ = ("_bodies", "_num_bytes")

    def __init__(self, bodies: OpenBodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow_to(self, num_body_bytes: int) -> None:
        """Count a body that has so many bytes by now. Raises TooManyRequestsError."""
        num_bytes = max(0, num_body_bytes - _FREE_BYTES)
        if num_bytes > self._num_bytes:
            self._bodies.add(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def give_back(self) -> None:
        """End the share."""
        if self._num_bytes:
            self._bodies.add(-self._num_bytes)
            self._num_bytes = 0
