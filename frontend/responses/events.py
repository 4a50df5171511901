"""The events of a response's stream: the items as they open, grow and close."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tandem.frontend.parsers.pieces import TokenLogprob
from tandem.frontend.responses.items import Status, encrypted
from tandem.frontend.responses.objects import (
    OutputCall,
    OutputInput,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from tandem.frontend.responses.tools import text_of_input

_encode = msgspec.json.Encoder().encode


class Events:
    """Numbers the events of one stream. Without a stream there are no bytes."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._number = 0

    def __call__(self, kind: str, **fields: object) -> bytes:
        if not self._is_stream:
            return b""
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(body))

    def delta(self, kind: bytes, place: bytes, text: str, more: bytes = b"") -> bytes:
        """Return the event of more text, of which an item has many.

        `place` and `more` are the JSON of the fields before and behind it.
        """
        if not self._is_stream:
            return b""
        number = self._number
        self._number += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b,"delta":%b%b}\n\n' % (
            kind,
            kind,
            number,
            place,
            _encode(text),
            more,
        )


def _fields(fields: dict[str, object]) -> bytes:
    """Return fields as JSON, to stand between others."""
    return _encode(fields)[1:-1]


class OpenItem(Protocol):
    """An item of the output that still grows."""

    def begin(self) -> bytes:
        """Return its first events."""

    def add(self, text: str) -> bytes:
        """Return the event of more text."""

    def end(self, status: Status) -> bytes:
        """Return its last events."""

    def item(self, status: Status) -> OutputItem:
        """Return the item as far as it has grown."""


class OpenText:
    """A message, with one part of text."""

    _name = "output_text"
    _has_logprobs = True

    def __init__(self, events: Events, id: str, index: int) -> None:
        self.id = id
        self._events = events
        self._index = index
        self._place = {"item_id": id, "output_index": index, "content_index": 0}
        self._place_json = _fields(self._place)
        self._delta = f"response.{self._name}.delta".encode()
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> bytes:
        item = self._item([], "in_progress")
        return self._events(
            "response.output_item.added", output_index=self._index, item=item
        ) + self._events("response.content_part.added", **self._place, part=self._part())

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        self._parts.append(text)
        self._logprobs += logprobs
        more = b',"logprobs":' + _encode(logprobs) if self._has_logprobs else b""
        return self._events.delta(self._delta, self._place_json, text, more)

    def end(self, status: Status) -> bytes:
        part, item = self._part(), self.item(status)
        done = {"text": part.text} | self._listed(self._logprobs)
        return (
            self._events(f"response.{self._name}.done", **self._place, **done)
            + self._events("response.content_part.done", **self._place, part=part)
            + self._events("response.output_item.done", output_index=self._index, item=item)
        )

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    def item(self, status: Status) -> OutputItem:
        return self._item([self._part()], status)

    def _part(self) -> OutputText | ReasoningText:
        return OutputText(self.text, logprobs=self._logprobs)

    def _listed(self, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
        """Return the field of the delta and the done event that lists their tokens."""
        return {"logprobs": logprobs} if self._has_logprobs else {}

    def _item(self, content: list[Any], status: Status) -> OutputItem:
        return OutputMessage(self.id, content, status)


class OpenReasoning(OpenText):
    """Reasoning, whose content a client may want in a form to send back."""

    _name = "reasoning_text"
    _has_logprobs = False

    def __init__(self, events: Events, id: str, index: int, *, is_encrypted: bool) -> None:
        super().__init__(events, id, index)
        self._is_encrypted = is_encrypted

    def _part(self) -> ReasoningText:
        return ReasoningText(self.text)

    def _item(self, content: list[Any], status: Status) -> OutputItem:
        sent_back = encrypted(self.text) if content and self._is_encrypted else msgspec.UNSET
        return OutputReasoning(self.id, content, status, sent_back)


class OpenCall:
    """A function call."""

    def __init__(self, events: Events, call: OutputCall, index: int) -> None:
        self._events = events
        self._index = index
        self._call = call
        self._place = {"item_id": call.id, "output_index": index}
        self._place_json = _fields(self._place)
        self._parts: list[str] = []

    def begin(self) -> bytes:
        item = self.item("in_progress")
        return self._events("response.output_item.added", output_index=self._index, item=item)

    def add(self, text: str) -> bytes:
        if not text:
            return b""
        self._parts.append(text)
        return self._events.delta(b"response.function_call_arguments.delta", self._place_json, text)

    def end(self, status: Status) -> bytes:
        arguments = "".join(self._parts)
        return self._events(
            "response.function_call_arguments.done",
            **self._place,
            name=self._call.name,
            arguments=arguments,
        ) + self._events(
            "response.output_item.done", output_index=self._index, item=self.item(status)
        )

    def item(self, status: Status) -> OutputItem:
        arguments = "".join(self._parts)
        return msgspec.structs.replace(self._call, arguments=arguments, status=status)


class OpenInput:
    """A call of a custom tool. Its input is a part of the arguments, known when they are whole."""

    def __init__(self, events: Events, call: OutputInput, index: int) -> None:
        self._events = events
        self._index = index
        self._call = call
        self._place = {"item_id": call.id, "output_index": index}
        self._parts: list[str] = []

    def begin(self) -> bytes:
        return self._events("response.output_item.added", output_index=self._index, item=self._call)

    def add(self, text: str) -> bytes:
        self._parts.append(text)
        return b""

    def end(self, status: Status) -> bytes:
        item = self.item(status)
        name = "response.custom_tool_call_input"
        return (
            self._events(f"{name}.delta", **self._place, delta=item.input)
            + self._events(f"{name}.done", **self._place, input=item.input)
            + self._events("response.output_item.done", output_index=self._index, item=item)
        )

    def item(self, status: Status) -> OutputInput:
        text = text_of_input("".join(self._parts))
        return msgspec.structs.replace(self._call, input=text, status=status)
