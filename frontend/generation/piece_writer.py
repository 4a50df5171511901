"""The writer of the APIs whose answers are one choice, by the pieces of its text."""

from collections.abc import Iterator
from typing import Protocol

import msgspec
from msgspec.structs import replace

from tandem.frontend.generation.choice_text import ChoiceText
from tandem.frontend.generation.generation import Answer, ChoiceRun
from tandem.frontend.http.exchange import ErrorShape
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, TokenLogprob
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
        self._listed = _ListedPieces(answer.runs[0].text) if is_listed else None
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


class _ListedPieces:
    """Gives each piece of content its tokens. Those of reasoning, calls and marks are left out."""

    def __init__(self, text: ChoiceText) -> None:
        self._text = text
        self._held: list[TokenLogprob] = []  # of tokens whose text has not come
        self._is_in_content = False

    def take(self, deltas: list[TokenDelta]) -> list[Piece]:
        """Return the pieces of deltas that have log probabilities."""
        singles = (single for delta in deltas for single in _singles(delta))
        return [piece for single in singles for piece in self._taken(single)]

    def _taken(self, delta: TokenDelta) -> list[Piece]:
        pieces = self._text.take([delta])
        token_ids, logprobs = self._text.with_logprobs(delta)
        num_taken = len(self._text.taken(delta))  # the token that ended the answer has no text
        listed = self._text.chat_logprobs(token_ids[:num_taken], logprobs[:num_taken])
        self._held += listed.content
        return list(map(self._with_tokens, pieces))

    def _with_tokens(self, piece: Piece) -> Piece:
        held, self._held = self._held, []
        was_in_content, self._is_in_content = self._is_in_content, isinstance(piece, Content)
        if not isinstance(piece, Content):
            return piece
        if not was_in_content:
            held = _last_of(held, len(piece.text.encode()))
        return Content(piece.text, tuple(held))


def _singles(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Yield a delta for each token; the last has all that the delta has beside its tokens."""
    token_ids, logprobs = delta.token_ids, delta.logprobs
    last = len(token_ids) - 1
    if logprobs is None or last < 1:
        yield delta
        return
    for index in range(last):
        yield TokenDelta([token_ids[index]], logprobs=[logprobs[index]])
    yield replace(delta, token_ids=token_ids[last:], logprobs=logprobs[last:])


def _last_of(held: list[TokenLogprob], num_bytes: int) -> list[TokenLogprob]:
    """Return the last tokens, whose texts have so many bytes: those before are marks."""
    first = len(held)
    while first and num_bytes > 0:
        first -= 1
        num_bytes -= len(held[first].bytes)
    return held[first:]
