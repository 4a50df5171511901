"""Pieces of an answer, between the text of a model and the bytes of a response.

The pieces are msgspec structs: one is made per streamed event, and a frozen dataclass takes four
times as long to make.
"""

from typing import Protocol

import msgspec


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token, in the form of chat."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer itself, with its tokens' log probabilities where the answer lists them."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model thinks before it answers."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A part of one tool call: the first part has its id and name, all may have arguments."""

    index: int  # of the call within its choice, counted from 0
    arguments: str = ""  # appended to those of the parts before
    id: str = ""
    name: str = ""


Piece = Content | Reasoning | ToolCallDelta


def part_key(piece: Piece) -> object:
    """Return a value that pieces of one part of an answer share."""
    return piece.index if isinstance(piece, ToolCallDelta) else type(piece)


class OutputParser(Protocol):
    """Splits the growing text of one choice into pieces."""

    @property
    def is_in_call(self) -> bool:
        """True within a call whose first part has gone out and whose last part has not."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text`, which is not empty, completes."""

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back so far. Called once, when the text has ended.

        The beginning of a call is left out of a text that was cut there.
        """
