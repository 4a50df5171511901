"""OpenAI's request and response bytes, as far as a load generator reads them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Endpoint = Literal["completions", "chat"]
ChatMessage = Mapping[str, Any]
Prompt = str | list[int] | Sequence[ChatMessage]  # text, token ids, or chat messages

PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class Course(msgspec.Struct):
    """Tandem's own fields of a choice that has ended."""

    timeline_ms: dict[str, float] = {}
    predicted_ms: float = 0.0


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    tandem: Course | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: CachedTokens | None = None


class ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class Chunk(msgspec.Struct):
    """A streamed chunk, or a whole response that was not streamed."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


_DECODER = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Decode an OpenAI chunk. Raises msgspec.DecodeError (ValidationError included)."""
    return _DECODER.decode(data)


def carries_output(chunk: Chunk) -> bool:
    """Return True for a streamed chunk that is an output event.

    Text counts, and so does an empty chunk in mid-stream: a token whose text is held back until a
    character is whole. The chat opener (a role) and a bare finish reason do not.
    """
    for choice in chunk.choices:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.reasoning_content)):
            return True
        if choice.finish_reason is None and not (delta and delta.role):
            return True
    return False


class SseParser:
    """Server-sent events from arbitrarily split bytes; comments and other fields are skipped."""

    __slots__ = ("_data", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that these bytes complete, in order."""
        events: list[bytes] = []
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        return events


class BodyBuilder(msgspec.Struct, frozen=True):
    """A builder of request bodies; `extra` is merged over everything else."""

    model: str
    endpoint: Endpoint = "completions"
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: dict[str, Any] = {}

    def encode(self, prompt: Prompt, max_tokens: int | None, cache_salt: str = "") -> bytes:
        """Return the request body for one prompt. Raises ValueError for token ids on chat."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature}
        if self.endpoint == "completions":
            body["prompt"] = prompt
        elif isinstance(prompt, str):
            body["messages"] = [{"role": "user", "content": prompt}]
        elif prompt and isinstance(prompt[0], Mapping):
            body["messages"] = prompt
        else:
            raise ValueError("chat takes text or messages, not token ids")
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if cache_salt:
            body["cache_salt"] = cache_salt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body | self.extra)
