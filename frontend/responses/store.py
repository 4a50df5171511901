"""The responses that a frontend keeps for `previous_response_id`, in memory and within bounds."""

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from tandem.runtime.errors import NotFoundError
from tandem.runtime.printable import short

_ENTRY_BYTES = 1024  # of an entry beside its JSON


class Stored(NamedTuple):
    """A response, and the input items that it answers."""

    owner: str  # name of the API key; empty without keys
    previous: str | None
    inputs: bytes
    body: bytes

    @property
    def num_bytes(self) -> int:
        """The memory that the entry takes."""
        return _ENTRY_BYTES + len(self.inputs) + len(self.body)


class _Output(msgspec.Struct):
    output: msgspec.Raw


_decode_output = msgspec.json.Decoder(_Output).decode


def output_of(stored: Stored) -> msgspec.Raw:
    """Return the JSON of a response's output items."""
    return _decode_output(stored.body).output


class _Shelf:
    """The responses of one owner by id, those used least recently first."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, Stored] = OrderedDict()
        self.num_bytes = 0

    def put(self, response_id: str, stored: Stored) -> None:
        self.stored[response_id] = stored
        self.num_bytes += stored.num_bytes

    def drop(self, response_id: str) -> None:
        self.num_bytes -= self.stored.pop(response_id).num_bytes


class ResponseStore:
    """Responses by owner and id.

    Where room is short, the owner with the most of it loses its least recently used response. So
    nobody loses one to others who has no more than the whole over the number of owners.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # by owner, none empty
        self._num_responses = 0
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """False when nothing is kept."""
        return self._max_responses > 0

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response, unless it is larger than all may be."""
        if stored.num_bytes > self._max_bytes:
            return
        self._shelves.setdefault(stored.owner, _Shelf()).put(response_id, stored)
        self._num_responses += 1
        self._num_bytes += stored.num_bytes
        while self._num_responses > self._max_responses:
            self._shrink(max(self._shelves, key=lambda each: len(self._shelves[each].stored)))
        while self._num_bytes > self._max_bytes:
            self._shrink(max(self._shelves, key=lambda each: self._shelves[each].num_bytes))

    def get(self, response_id: str, owner: str, param: str = "response_id") -> Stored:
        """Return a response of this owner. Raises NotFoundError."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.stored:
            raise NotFoundError(
                f"no response {short(response_id)!r} is stored at this frontend", param=param
            )
        shelf.stored.move_to_end(response_id)
        return shelf.stored[response_id]

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response of this owner. Raises NotFoundError."""
        self.get(response_id, owner)
        self._drop(response_id, owner)

    def _shrink(self, owner: str) -> None:
        self._drop(next(iter(self._shelves[owner].stored)), owner)

    def _drop(self, response_id: str, owner: str) -> None:
        shelf = self._shelves[owner]
        self._num_responses -= 1
        self._num_bytes -= shelf.stored[response_id].num_bytes
        shelf.drop(response_id)
        if not shelf.stored:
            del self._shelves[owner]
