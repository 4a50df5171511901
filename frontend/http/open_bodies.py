"""The memory of request bodies that are being read, under one limit for all of them."""

from tandem.frontend.access.room import Room
from tandem.frontend.errors import TooManyRequestsError

_FREE_BYTES = 16 * 1024  # of each body, so that a small request never waits for large ones


class BodyShare:
    """The bytes of one body in the room of all that are being read or turned into prompts."""

    __slots__ = ("_key", "_num_bytes", "_room")

    def __init__(self, room: Room, key: str) -> None:
        self._room = room
        self._key = key  # the name of the API key; empty without keys
        self._num_bytes = 0

    def grow_to(self, num_body_bytes: int) -> None:
        """Count a body that has so many bytes by now. Raises TooManyRequestsError."""
        num_more = num_body_bytes - _FREE_BYTES - self._num_bytes
        if num_more <= 0:
            return
        if not self._room.take(num_more, self._key):
            raise TooManyRequestsError(
                f"the frontend holds up to {self._room.limit} bytes of unfinished bodies, and of "
                "those of one API key a share"
            )
        self._num_bytes += num_more

    def give_back(self) -> None:
        """End the share."""
        if self._num_bytes:
            self._room.give_back(self._num_bytes, self._key)
            self._num_bytes = 0
