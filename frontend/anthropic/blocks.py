"""Messages of content blocks, and their translation to the messages of a chat."""

from typing import Any, Literal

import msgspec
from msgspec import Raw

from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.outline import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    begins,
    is_null,
    read_list,
)
from tandem.frontend.bodies.typed import NULL, read, read_type
from tandem.runtime.errors import InvalidRequestError

_decode_text = msgspec.json.Decoder(str).decode


class Text(msgspec.Struct, frozen=True):
    """Text of either side."""

    text: str
    type: Literal["text"] = "text"
    cache_control: Raw = NULL
    citations: Raw = NULL


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning of the model; the signature of a server says nothing to this one."""

    thinking: str
    signature: str = ""
    type: Literal["thinking"] = "thinking"
    cache_control: Raw = NULL


class ToolUse(msgspec.Struct, frozen=True):
    """A call that the model made."""

    id: str
    name: str
    input: Raw
    type: Literal["tool_use"] = "tool_use"
    cache_control: Raw = NULL
    caller: Raw = NULL


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a call."""

    tool_use_id: str
    content: Raw = NULL
    is_error: bool | None = None
    type: Literal["tool_result"] = "tool_result"
    cache_control: Raw = NULL


class Message(msgspec.Struct, frozen=True):
    """A message; `content` is text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Raw


Block = Text | Thinking | ToolUse | ToolResult
_KINDS: dict[str, type[Text] | type[Thinking] | type[ToolUse] | type[ToolResult]] = {
    "text": Text,
    "thinking": Thinking,
    "tool_use": ToolUse,
    "tool_result": ToolResult,
}
_BY_ROLE = {"user": (Text, ToolResult), "assistant": (Text, Thinking, ToolUse), "system": (Text,)}


class Conversation:
    """The messages of a chat, made of those of a body. Counts the blocks of all."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._num_blocks = 0

    @property
    def is_begun_answer(self) -> bool:
        """True if the last message is the beginning of the answer, which the model continues."""
        last = self.messages[-1]
        text = last.get("content") or ""
        return last["role"] == "assistant" and "tool_calls" not in last and bool(text.strip())

    def add_system(self, raw: Raw) -> None:
        """Add the system prompt, text or blocks of text, unless it is null."""
        if not is_null(raw):
            text = self._joined(raw, "system")
            if text:
                self.messages.append({"role": "system", "content": text})

    def add_all(self, raw: Raw) -> None:
        """Add the messages of a body. Raises InvalidRequestError naming the field."""
        for index, each in enumerate(read_list(raw, MAX_MESSAGES, "messages", 1)):
            where = f"messages[{index}]"
            self._add(read(Message, each, where), where)

    def _add(self, message: Message, where: str) -> None:
        where = f"{where}.content"
        if begins(message.content, b'"'):
            text = self._text(message.content, where)
            self.messages.append({"role": message.role, "content": text})
            return
        blocks = self._blocks(message.content, where)
        for index, block in enumerate(blocks):
            if not isinstance(block, _BY_ROLE[message.role]):
                raise invalid_field(
                    f"{where}[{index}].type",
                    f"is {block.type!r}, which a message of the role {message.role!r} cannot have",
                )
        if message.role == "assistant":
            self._add_answer(blocks)
        else:
            self._add_turn(message.role, blocks, where)

    def _add_answer(self, blocks: list[Block]) -> None:
        answer: dict[str, Any] = {"role": "assistant"}
        texts = [block.text for block in blocks if isinstance(block, Text)]
        reasonings = [block.thinking for block in blocks if isinstance(block, Thinking)]
        calls = [_call(block) for block in blocks if isinstance(block, ToolUse)]
        answer |= {"content": "".join(texts)} if texts or not calls else {}
        answer |= {"reasoning_content": "".join(reasonings)} if reasonings else {}
        answer |= {"tool_calls": calls} if calls else {}
        self.messages.append(answer)

    def _add_turn(self, role: str, blocks: list[Block], where: str) -> None:
        """Add a message for each result, and one for the text."""
        for index, block in enumerate(blocks):
            if isinstance(block, ToolResult):
                content = self._joined(block.content, f"{where}[{index}].content")
                self.messages.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                )
        texts = [block.text for block in blocks if isinstance(block, Text)]
        if texts or not blocks:
            self.messages.append({"role": role, "content": "\n\n".join(texts)})

    def _joined(self, raw: Raw, where: str) -> str:
        """Return the text of a field that is text, a list of text blocks, or null."""
        if is_null(raw):
            return ""
        if begins(raw, b'"'):
            return self._text(raw, where)
        texts = []
        for index, block in enumerate(self._blocks(raw, where)):
            if not isinstance(block, Text):
                raise unsupported(f"{where}[{index}].type", block.type)
            texts.append(block.text)
        return "\n\n".join(texts)

    def _text(self, raw: Raw, where: str) -> str:
        try:
            return _decode_text(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"`{where}`: {error}", param=where) from error

    def _blocks(self, raw: Raw, where: str) -> list[Block]:
        if not begins(raw, b"["):
            raise invalid_field(where, "must be text or a list of blocks")
        raws = read_list(raw, MAX_CONTENT_PARTS, where)
        self._num_blocks += len(raws)
        if self._num_blocks > MAX_CONTENT_PARTS:
            raise InvalidRequestError(
                f"the body has over {MAX_CONTENT_PARTS} content blocks", param="messages"
            )
        return [_read_block(each, f"{where}[{index}]") for index, each in enumerate(raws)]


def _read_block(raw: Raw, where: str) -> Block:
    name = read_type(raw, where)
    kind = _KINDS.get(name)
    if kind is None:
        raise unsupported(f"{where}.type", name)
    block = read(kind, raw, where)
    if isinstance(block, ToolUse) and not begins(block.input, b"{"):
        raise invalid_field(f"{where}.input", "must be an object")
    return block


def _call(block: ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": bytes(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}
