"""Log probabilities of a prompt's tokens, packed as on the wire."""

import sys
from array import array
from typing import Any

from tandem.runtime.wire.bounds import Count, Message, Payload

FLOAT_BYTES = 4
TOKEN_ID_BYTES = 4


class PromptLogprobs(Message, frozen=True, array_like=True, tag=False):
    """Natural-log probabilities of tokens of a prompt, each given the tokens before it.

    The first token of a prompt has none. At each position `num_top` likeliest tokens follow, best
    first. All numbers are little-endian.
    """

    num_top: Count
    logprobs: Payload  # f32 [num_tokens]
    top_ids: Payload  # u32 [num_tokens, num_top]
    top_logprobs: Payload  # f32 [num_tokens, num_top]

    def __len__(self) -> int:
        return len(self.logprobs) // FLOAT_BYTES

    def are_of(self, num_tokens: int) -> bool:
        """Return True if each part has the length for `num_tokens` tokens."""
        num_tops = num_tokens * self.num_top
        return (
            self.num_top >= 0
            and len(self.logprobs) == num_tokens * FLOAT_BYTES
            and len(self.top_ids) == num_tops * TOKEN_ID_BYTES
            and len(self.top_logprobs) == num_tops * FLOAT_BYTES
        )

    def rows(self, start: int, end: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return logprob and likeliest (token id, logprob) of tokens [start, end)."""
        top = self.num_top
        logprobs, ids, values = array("f"), array("I"), array("f")
        _unpack(logprobs, self.logprobs, start, end)
        _unpack(ids, self.top_ids, start * top, end * top)
        _unpack(values, self.top_logprobs, start * top, end * top)
        pairs = list(zip(ids, values, strict=True))
        return [(each, pairs[i * top : (i + 1) * top]) for i, each in enumerate(logprobs)]


class PromptScores:
    """The log probabilities of a prompt's tokens, as far as they are computed."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._logprobs = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def put(self, start: int, part: PromptLogprobs) -> None:
        """Replace those from `start` on, of which there are as many or more, by `part`."""
        num_tops = start * self.num_top
        self._logprobs[start * FLOAT_BYTES :] = part.logprobs
        self._top_ids[num_tops * TOKEN_ID_BYTES :] = part.top_ids
        self._top_logprobs[num_tops * FLOAT_BYTES :] = part.top_logprobs

    def whole(self) -> PromptLogprobs:
        """Return all of them."""
        return PromptLogprobs(
            self.num_top, bytes(self._logprobs), bytes(self._top_ids), bytes(self._top_logprobs)
        )


def _unpack(values: "array[Any]", data: bytes, start: int, end: int) -> None:
    values.frombytes(data[start * values.itemsize : end * values.itemsize])
    if sys.byteorder == "big":
        values.byteswap()
