"""The items of a conversation, and their translation to the messages of a chat."""

import base64
import binascii
from typing import Any, Literal

import msgspec
from msgspec import Raw

from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.outline import (
    MAX_CONTENT_PARTS,
    MAX_FIELD_BYTES,
    MAX_MESSAGES,
    begins,
    decode_fields,
    read_list,
)
from tandem.frontend.bodies.typed import read, read_type
from tandem.frontend.responses.tools import chat_name
from tandem.runtime.printable import short

Status = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, frozen=True):
    """A part of an item's content; only text is supported."""

    type: str
    text: str | None = None


Content = str | list[Part]


class Message(msgspec.Struct, frozen=True):
    """A message of any role. Clients send back answers with all fields that they have."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None


class FunctionOutput(msgspec.Struct, frozen=True):
    """The result of a call."""

    call_id: str
    output: Content
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    status: Status | None = None


class ReasoningItem(msgspec.Struct, frozen=True):
    """Reasoning of the model; a client may keep only `encrypted_content` of it."""

    summary: list[Part]
    content: list[Part] | None = None
    encrypted_content: str | None = None
    type: Literal["reasoning"] = "reasoning"
    id: str | None = None
    status: Status | None = None

    def text(self, where: str) -> str:
        """Return the reasoning. Raises InvalidRequestError naming the field."""
        if self.content or self.encrypted_content is None:
            return text_of(self.content or self.summary, f"{where}.content")
        try:
            return base64.b64decode(self.encrypted_content, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            field = f"{where}.encrypted_content"
            raise invalid_field(field, "is not of this server") from error


Item = Message | FunctionCall | FunctionOutput | ReasoningItem
_KINDS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionOutput,
    "reasoning": ReasoningItem,
}


def encrypted(reasoning: str) -> str:
    """Return reasoning in the form that a client sends back. It is encoded, and hidden to none."""
    return base64.b64encode(reasoning.encode()).decode()


def user_message(text: Raw) -> Message:
    """Return the message of an input that is a string."""
    return Message("user", msgspec.json.decode(text, type=str))


def read_items(raw: bytes | Raw, where: str = "input") -> list[Item]:
    """Return the items of a list. Raises InvalidRequestError naming the field."""
    raws = read_list(raw, MAX_MESSAGES, where)
    items = [_read_item(item, f"{where}[{index}]") for index, item in enumerate(raws)]
    num_parts = sum(map(_num_parts, items))
    if num_parts > MAX_CONTENT_PARTS:
        raise invalid_field(
            where, f"has {num_parts} content parts, the most is {MAX_CONTENT_PARTS}"
        )
    return items


def _read_item(raw: Raw, where: str) -> Item:
    name = read_type(raw, where, "message")
    kind = _KINDS.get(name)
    if kind is None:
        raise unsupported(f"{where}.type", name)
    if len(raw) > MAX_FIELD_BYTES:
        for field, value in decode_fields(raw).items():
            if begins(value, b"["):
                read_list(value, MAX_CONTENT_PARTS, f"{where}.{field}")
    return read(kind, raw, where)


def _num_parts(item: Item) -> int:
    match item:
        case Message(content=content) | FunctionOutput(output=content):
            return len(content)
        case ReasoningItem():
            return len(item.content or ()) + len(item.summary)
        case FunctionCall():
            return 0


def text_of(content: Content, where: str) -> str:
    """Return the text of a content. Raises InvalidRequestError for a part that is not text."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.text is None:
            field = f"{where}[{index}].type"
            raise invalid_field(field, f"is {short(part.type)!r}; only text is supported")
    return "".join(part.text or "" for part in content)


class Conversation:
    """The messages of a chat, made of items. Items of one answer become one message."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        if instructions is not None:
            self.messages.append({"role": "system", "content": instructions})

    def add(self, items: list[Item], where: str) -> None:
        """Add items. `where` names their list in errors."""
        for index, item in enumerate(items):
            self._add(item, f"{where}[{index}]")

    def _add(self, item: Item, where: str) -> None:
        match item:
            case Message(role="assistant"):
                message = self._answer_without("tool_calls", "content")
                message["content"] = text_of(item.content, f"{where}.content")
            case Message():
                content = text_of(item.content, f"{where}.content")
                self.messages.append({"role": item.role, "content": content})
            case ReasoningItem():
                message = self._answer_without("tool_calls", "content", "reasoning_content")
                message["reasoning_content"] = item.text(where)
            case FunctionCall():
                name = chat_name(item.namespace, item.name)
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._answer_without().setdefault("tool_calls", []).append(call)
            case FunctionOutput():
                content = text_of(item.output, f"{where}.output")
                self.messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": content}
                )

    def _answer_without(self, *fields: str) -> dict[str, Any]:
        """Return the answer that ends the chat so far. It is a new one if that has a field."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "assistant" and not last.keys() & set(fields):
            return last
        self.messages.append({"role": "assistant"})
        return self.messages[-1]
