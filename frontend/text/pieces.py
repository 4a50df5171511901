"""The answers of a model that writes text, as pieces for the writer of another API than chat."""

from typing import Any

import msgspec

from tandem.frontend.chat.responses import ResponseHead
from tandem.frontend.generation.piece_writer import Ending, PieceWriter
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, TokenLogprob, ToolCallDelta
from tandem.frontend.telemetry.request_log import NO_TOKENS, TokenCounts
from tandem.frontend.text.answers import Answer, as_chunk
from tandem.runtime.errors import ProtocolError
from tandem.runtime.wire.messages import FinishReason


class TextPieces:
    """A `TextWriter` that reads one choice of a chat and gives its pieces to `writer`."""

    def __init__(self, head: ResponseHead, writer: PieceWriter) -> None:
        self._head = head
        self._writer = writer
        self._has_begun = False
        self._reason: FinishReason = "stop"
        self._tokens = NO_TOKENS
        self._num_reasoning = 0

    def add(self, answer: Answer) -> bytes:
        self._count(answer.get("usage"))
        body = b""
        if not self._has_begun:
            self._has_begun = True
            body = self._writer.begin(self._tokens)
        for choice in as_chunk(answer, self._head)["choices"]:
            if choice.get("finish_reason") == "length":
                self._reason = "length"
            pieces = _pieces(choice.get("delta", {}), choice.get("logprobs"))
            if pieces:
                body += self._writer.take(pieces)
        return body

    def end(self) -> bytes:
        return self._writer.end(Ending(self._reason, self._tokens, self._num_reasoning))

    def _count(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        self._tokens = TokenCounts(
            _number(usage, "prompt_tokens"),
            _number(usage, "completion_tokens"),
            _number(usage.get("prompt_tokens_details"), "cached_tokens"),
        )
        details = usage.get("completion_tokens_details")
        self._num_reasoning = _number(details, "reasoning_tokens")


def _number(counts: object, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if type(value) is int and value >= 0 else 0


def _pieces(delta: dict[str, Any], logprobs: object) -> list[Piece]:
    pieces: list[Piece] = []
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        pieces.append(Reasoning(reasoning))
    content = delta.get("content")
    if isinstance(content, str) and content:
        pieces.append(Content(content, _listed(logprobs)))
    calls = delta.get("tool_calls")
    return pieces + list(map(_call, calls)) if isinstance(calls, list) else pieces


def _listed(logprobs: object) -> tuple[TokenLogprob, ...]:
    """Return the tokens of a content. Raises ProtocolError for what is no list of them."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    try:
        return msgspec.convert(content or (), tuple[TokenLogprob, ...])
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the worker's answer has wrong `logprobs`: {error}") from error


def _call(chunk: object) -> ToolCallDelta:
    """Return one part of a call. Raises ProtocolError for anything else."""
    fields = chunk if isinstance(chunk, dict) else {}
    function = fields.get("function")
    function = function if isinstance(function, dict) else {}
    index, parts = fields.get("index", 0), (function.get("arguments") or "", fields.get("id") or "")
    name = function.get("name") or ""
    if type(index) is not int or not all(isinstance(part, str) for part in (*parts, name)):
        raise ProtocolError("the worker's answer has a tool call that is not one")
    return ToolCallDelta(index, *parts, name)
