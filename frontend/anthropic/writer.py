"""The message of one choice in Anthropic's shape: a `PieceWriter`."""

from typing import Any, Literal

import msgspec
from msgspec import Raw

from tandem.frontend.anthropic.errors import AnthropicErrors
from tandem.frontend.generation.piece_writer import Ending
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta, part_key
from tandem.frontend.telemetry.request_log import TokenCounts
from tandem.runtime.address import new_id

_encode = msgspec.json.Encoder().encode
_DELTAS = {  # of each kind of piece, up to its text
    Content: b'{"type":"text_delta","text":',
    Reasoning: b'{"type":"thinking_delta","thinking":',
    ToolCallDelta: b'{"type":"input_json_delta","partial_json":',
}
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str
    type: Literal["text"] = "text"


class ThinkingBlock(msgspec.Struct, frozen=True):
    """Reasoning. The signature is empty: nothing checks it."""

    thinking: str
    signature: str = ""
    type: Literal["thinking"] = "thinking"


class ToolUseBlock(msgspec.Struct, frozen=True):
    """A call; `input` is JSON as the model wrote it."""

    id: str
    name: str
    input: Raw | dict[str, str]
    type: Literal["tool_use"] = "tool_use"


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts; the two kinds of input tokens add up to the prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageObject(msgspec.Struct, frozen=True):
    """A message, whole or as a stream begins it."""

    id: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageWriter(AnthropicErrors):
    """Joins the pieces of one kind to a content block."""

    def __init__(self, request_id: str, model: str, *, is_stream: bool) -> None:
        self._id = f"msg_{request_id}"
        self._model = model
        self._is_stream = is_stream
        self._blocks: list[Block] = []  # those that have ended
        self._parts: list[str] = []  # of the block that grows
        self._first: Piece | None = None  # of the block that grows
        self._before_text = b""  # in the events of the block that grows
        self._call_id = ""

    def begin(self, tokens: TokenCounts) -> bytes:
        message = MessageObject(self._id, self._model, [], None, None, _usage(tokens))
        return self._event("message_start", message=message) + self._event("ping")

    def take(self, pieces: list[Piece]) -> bytes:
        return b"".join(map(self._take, pieces))

    def end(self, ending: Ending) -> bytes:
        begin = b"" if self._blocks or self._first else self._open(Content(""))
        closed = begin + self._close()
        calls = [block for block in self._blocks if isinstance(block, ToolUseBlock)]
        reason = _stop_reason(ending, bool(calls) and not ending.is_call_cut)
        usage = _usage(ending.tokens)
        message = MessageObject(
            self._id, self._model, self._blocks, reason, ending.stop_string, usage
        )
        if not self._is_stream:
            return _encode(message)
        delta = {"stop_reason": reason, "stop_sequence": ending.stop_string}
        last = self._event("message_delta", delta=delta, usage=usage)
        return closed + last + self._event("message_stop")

    def _take(self, piece: Piece) -> bytes:
        opened = b""
        if self._first is None or part_key(self._first) != part_key(piece):
            opened = self._close() + self._open(piece)
        text = piece.arguments if isinstance(piece, ToolCallDelta) else piece.text
        self._parts.append(text)
        if not text or not self._is_stream:
            return opened
        return opened + self._before_text + _encode(text) + b"}}\n\n"

    def _open(self, piece: Piece) -> bytes:
        """Begin the block that a piece belongs to."""
        self._first, self._parts = piece, []
        if isinstance(piece, ToolCallDelta):
            self._call_id = piece.id or f"toolu_{new_id()}"
        block, index = self._block(), len(self._blocks)
        self._before_text = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
            % (index, _DELTAS[type(piece)])
        )
        return self._event("content_block_start", index=index, content_block=block)

    def _close(self) -> bytes:
        """End the block that grows."""
        if self._first is None:
            return b""
        index, block = len(self._blocks), self._block()
        self._blocks.append(block)
        signed = b""
        if isinstance(block, ThinkingBlock):
            delta = {"type": "signature_delta", "signature": ""}
            signed = self._event("content_block_delta", index=index, delta=delta)
        self._first = None
        return signed + self._event("content_block_stop", index=index)

    def _block(self) -> Block:
        text = "".join(self._parts)
        match self._first:
            case Reasoning():
                return ThinkingBlock(text)
            case ToolCallDelta(name=name):
                return ToolUseBlock(self._call_id, name, _object(text))
            case _:
                return TextBlock(text)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._is_stream:
            return b""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _object(text: str) -> Raw | dict[str, str]:
    """Return the arguments of a call. Those that are no JSON object are under one key."""
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return Raw(text.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {"arguments": text} if text.strip() else {}


def _usage(tokens: TokenCounts) -> MessageUsage:
    uncached = max(0, tokens.num_prompt - tokens.num_cached)
    return MessageUsage(uncached, tokens.num_generated, tokens.num_cached)


def _stop_reason(ending: Ending, has_whole_calls: bool) -> StopReason:
    if ending.reason == "length":
        return "max_tokens"
    if ending.stop_string is not None:
        return "stop_sequence"
    return "tool_use" if has_whole_calls else "end_turn"
