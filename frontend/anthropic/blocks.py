"""Messages of content blocks, and their translation to the messages of a chat."""

from typing import Literal

import msgspec
from msgspec import Raw

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.images import Images
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    begins,
    is_null,
    read_list,
)
from tandem.frontend.bodies.typed import NULL, read, read_type
from tandem.frontend.bodies.unseen import Unseen
from tandem.frontend.chat.messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ImagePart,
    MessageToolCall,
)
from tandem.frontend.chat.parts import IN_NEXT_MESSAGE, content_of
from tandem.runtime.errors import InvalidRequestError

_decode_text = msgspec.json.Decoder(str).decode


class Text(msgspec.Struct, frozen=True):
    """Text of either side."""

    text: str
    type: Literal["text"] = "text"


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning of the model; the signature of a server says nothing to this one."""

    thinking: str
    type: Literal["thinking"] = "thinking"


class ToolUse(msgspec.Struct, frozen=True):
    """A call that the model made."""

    id: str
    name: str
    input: Raw
    type: Literal["tool_use"] = "tool_use"


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a call."""

    tool_use_id: str
    content: Raw = NULL
    is_error: bool | None = None
    type: Literal["tool_result"] = "tool_result"


class Image(msgspec.Struct, frozen=True):
    """An image of the user, or of a tool."""

    source: Raw = NULL
    type: Literal["image"] = "image"


class Source(msgspec.Struct, frozen=True):
    """The bytes of an image, or its URL."""

    type: str
    data: str | None = None
    url: Raw = NULL


class Message(msgspec.Struct, frozen=True):
    """A message; `content` is text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Raw


Block = Text | Thinking | ToolUse | ToolResult | Image
_KINDS: dict[str, type[Block]] = {
    "text": Text,
    "image": Image,
    "thinking": Thinking,
    "tool_use": ToolUse,
    "tool_result": ToolResult,
}


class Conversation:
    """The messages of a chat, made of those of a body. Counts the blocks of all.

    Blocks that another server has put into answers are left out.
    """

    def __init__(self, ignored: Ignored, images: Images | None, *, images_as_text: bool) -> None:
        self.messages: list[ChatMessage] = []
        self.origins: list[str] = []  # the paths of the messages in the body
        self._ignored = ignored
        self._images = images  # None for a model that sees none
        self._unseen = Unseen(ignored, as_text=images_as_text, sees=images is not None)
        self._num_blocks = 0

    @property
    def is_begun_answer(self) -> bool:
        """True if the last message is the beginning of the answer, which the model continues."""
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls and bool(last.text("").strip())

    def add_system(self, raw: Raw) -> None:
        """Add the system prompt, text or blocks of text, unless it is null."""
        if not is_null(raw):
            text = self._joined(raw, "system", is_new=True)
            if text:
                self._append("system", ChatMessage("system", text))

    def add_all(self, raw: Raw) -> None:
        """Add the messages of a body. Raises InvalidRequestError naming the field."""
        raws = read_list(raw, MAX_MESSAGES, "messages", 1)
        read_messages = [read(Message, each, f"messages[{i}]") for i, each in enumerate(raws)]
        answers = (i for i, each in enumerate(read_messages) if each.role == "assistant")
        last = max(answers, default=-1)
        for index, message in enumerate(read_messages):
            self._add(message, f"messages[{index}]", is_new=index > last)

    def _append(self, origin: str, message: ChatMessage) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def _add(self, message: Message, where: str, *, is_new: bool) -> None:
        if begins(message.content, b'"'):
            text = self._text(message.content, f"{where}.content")
            self._append(where, ChatMessage(message.role, text))
        elif message.role == "assistant":
            self._add_answer(message.content, where)
        else:
            self._add_turn(message, where, is_new=is_new)

    def _add_answer(self, raw: Raw, where: str) -> None:
        texts: list[str] = []
        reasonings: list[str] = []
        calls: list[MessageToolCall] = []
        for block, kind, field in self._blocks(raw, f"{where}.content"):
            match block:
                case Text(text=text):
                    texts.append(text)
                case Thinking(thinking=thinking):
                    reasonings.append(thinking)
                case ToolUse():
                    calls.append(_call(block))
                case ToolResult():
                    raise _misplaced(field, kind, "assistant")
                case None | Image():
                    self._ignored.add(f"{field}.type", kind)
        answer = ChatMessage(
            "assistant",
            "".join(texts) if texts or not calls else None,
            tool_calls=calls or None,
            reasoning_content="".join(reasonings) if reasonings else None,
        )
        self._append(where, answer)

    def _add_turn(self, message: Message, where: str, *, is_new: bool) -> None:
        """Add a message for each result, and one for the text and the images, of results too."""
        parts: list[ContentPart] = []
        blocks = self._blocks(message.content, f"{where}.content")
        for block, kind, field in blocks:
            match block:
                case Text(text=text):
                    parts.append(ContentPart("text", text))
                case Image() if message.role == "user" and self._images is not None:
                    parts.append(_seen(self._images, block, field))
                case ToolResult() if message.role == "user":
                    content = self._joined(
                        block.content, f"{field}.content", is_new=False, images=parts
                    )
                    result = ChatMessage("tool", content, tool_call_id=block.tool_use_id)
                    self._append(field, result)
                case None | Image():
                    text = self._unseen.text(kind, field, is_new=is_new)
                    parts.append(ContentPart("text", text))
                case _:
                    raise _misplaced(field, kind, message.role)
        if parts or not blocks:
            self._append(where, ChatMessage(message.role, content_of(parts)))

    def _joined(
        self, raw: Raw, where: str, *, is_new: bool, images: list[ContentPart] | None = None
    ) -> str:
        """Return the text of a field that is text or a list of text blocks, or null.

        Adds images that the model sees to `images`, if given.
        """
        if is_null(raw):
            return ""
        if begins(raw, b'"'):
            return self._text(raw, where)
        texts = []
        for block, kind, field in self._blocks(raw, where):
            if isinstance(block, Text):
                texts.append(block.text)
            elif isinstance(block, Image) and images is not None and self._images is not None:
                images.append(_seen(self._images, block, field))
                texts.append(IN_NEXT_MESSAGE)
            else:
                texts.append(self._unseen.text(kind, field, is_new=is_new))
        return "\n\n".join(texts)

    def _text(self, raw: Raw, where: str) -> str:
        try:
            return _decode_text(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"`{where}`: {error}", param=where) from error

    def _blocks(self, raw: Raw, where: str) -> list[tuple[Block | None, str, str]]:
        """Return each block with its type and its field; None for one of an unknown type."""
        if not begins(raw, b"["):
            raise invalid_field(where, "must be text or a list of blocks")
        raws = read_list(raw, MAX_CONTENT_PARTS, where)
        self._num_blocks += len(raws)
        if self._num_blocks > MAX_CONTENT_PARTS:
            raise InvalidRequestError(
                f"the body has over {MAX_CONTENT_PARTS} content blocks", param="messages"
            )
        return [_read_block(each, f"{where}[{index}]") for index, each in enumerate(raws)]


def _misplaced(field: str, kind: str, role: str) -> InvalidRequestError:
    return invalid_field(
        f"{field}.type", f"is {kind!r}, which a message of the role {role!r} cannot have"
    )


def _read_block(raw: Raw, where: str) -> tuple[Block | None, str, str]:
    name = read_type(raw, where)
    kind = _KINDS.get(name)
    if kind is None:
        return None, name, where
    block = read(kind, raw, where)
    if isinstance(block, ToolUse) and not begins(block.input, b"{"):
        raise invalid_field(f"{where}.input", "must be an object")
    return block, name, where


def _seen(images: Images, block: Image, where: str) -> ImagePart:
    where = f"{where}.source"
    source = read(Source, block.source, where)
    if source.type == "base64" and source.data is not None:
        image = images.of_base64(source.data, f"{where}.data")
    elif source.type == "url":
        image = images.of_url(source.url, f"{where}.url")
    else:
        raise invalid_field(f"{where}.type", "must be 'base64', with `data`, or 'url'")
    return ImagePart("image", data=image, field=where)


def _call(block: ToolUse) -> MessageToolCall:
    function = CalledFunction(block.name, bytes(block.input).decode())
    return MessageToolCall(id=block.id, type="function", function=function)
