"""The sink of the APIs whose answers are one choice: its pieces go to a writer."""

from typing import Protocol

import msgspec

from tandem.frontend.generation.generation import Answer, ChoiceRun
from tandem.frontend.generation.listed_pieces import ListedPieces
from tandem.frontend.http.exchange import ErrorShape, Exchange
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
    """Makes the response of one choice. Without a stream its methods return no bytes."""

    def begin(self, tokens: TokenCounts) -> bytes:
        """Return the first bytes of the stream. Nothing is generated yet."""

    def take(self, pieces: list[Piece]) -> bytes:
        """Return the bytes of the stream for more pieces."""

    def end(self, ending: Ending) -> bytes:
        """Return the last bytes of the stream."""

    def whole(self) -> bytes:
        """Return the whole response, after `end`."""


class PieceSink:
    """Answers by the events of a writer, or by its whole response."""

    def __init__(
        self, answer: Answer, exchange: Exchange, writer: PieceWriter, *, is_stream: bool
    ) -> None:
        self._answer = answer
        self._exchange = exchange
        self._writer = writer
        self._is_stream = is_stream
        is_listed = answer.plan.body.num_logprobs is not None
        self._listed = ListedPieces(answer.runs[0].text) if is_listed else None
        self._num_counted = 0  # generated tokens whose pieces have come
        self._num_reasoning = 0

    async def first(self, run: ChoiceRun) -> bytes:
        begin = self._writer.begin(self._answer.tokens())
        if not self._is_stream:
            return b""
        await self._exchange.start_stream(self._answer.headers(run, self._exchange))
        return begin

    def deltas(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        pieces = (self._listed or run.text).take(deltas)
        if not pieces:
            return b""
        if type(pieces[-1]) is Reasoning:
            self._num_reasoning += run.text.num_tokens - self._num_counted
        self._num_counted = run.text.num_tokens
        return self._writer.take(pieces)

    async def last(self, run: ChoiceRun, body: bytes) -> None:
        text, tokens = run.text, self._answer.tokens()
        assert text.finish_reason is not None
        ending = Ending(
            text.finish_reason, tokens, self._num_reasoning, text.stop_string, text.is_call_cut
        )
        body += self._writer.end(ending)
        if self._is_stream:
            await self._exchange.end_stream(body)
        else:
            headers = self._answer.headers(run, self._exchange)
            await self._exchange.respond(200, self._writer.whole(), headers)
