"""The writer of the APIs whose answers are one choice, by the pieces of its text."""

from typing import Protocol

import msgspec

from tandem.frontend.generation.generation import Answer, ChoiceRun
from tandem.frontend.generation.listed_pieces import ListedPieces
from tandem.frontend.http.exchange import ErrorShape
from tandem.frontend.parsers.pieces import Piece, Reasoning
from tandem.frontend.telemetry.request_log import TokenCounts
from tandem.runtime.wire.messages import FinishReason, TokenDelta


class Ending(msgspec.Struct, frozen=True):
    """The end of an answer."""

    reason: FinishReason
    tokens: TokenCounts
    num_reasoning: int = 0  # of the generated tokens
    stop_string: str | None = None
    is_call_cut: bool = False  # the last call has no end


class PieceWriter(ErrorShape, Protocol):
    """Makes the response of one choice, as AnswerWriter does: a whole one comes at its end."""

    def begin(self, tokens: TokenCounts) -> bytes:
        """Return the first bytes of the stream. Nothing is generated yet."""

    def take(self, pieces: list[Piece]) -> bytes:
        """Return the bytes of the stream for more pieces."""

    def end(self, ending: Ending) -> bytes:
        """Return the last bytes of the stream, or the whole response."""


class ChoiceWriter:
    """An `AnswerWriter` that gives the pieces of one choice to `writer`."""

    def __init__(self, answer: Answer, writer: PieceWriter) -> None:
        self._answer = answer
        self._writer = writer
        is_listed = answer.plan.body.num_logprobs is not None
        self._listed = ListedPieces(answer.runs[0].text) if is_listed else None
        self._num_counted = 0  # generated tokens whose pieces have come
        self._num_reasoning = 0

    async def begin(self, run: ChoiceRun) -> bytes:
        return self._writer.begin(self._answer.tokens())

    def take(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        pieces = (self._listed or run.text).take(deltas)
        if not pieces:
            return b""
        if type(pieces[-1]) is Reasoning:
            self._num_reasoning += run.text.num_tokens - self._num_counted
        self._num_counted = run.text.num_tokens
        return self._writer.take(pieces)

    async def end(self, run: ChoiceRun) -> bytes:
        text, tokens = run.text, self._answer.tokens()
        assert text.finish_reason is not None
        ending = Ending(
            text.finish_reason, tokens, self._num_reasoning, text.stop_string, text.is_call_cut
        )
        return self._writer.end(ending)
