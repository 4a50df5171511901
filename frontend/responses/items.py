"""The items of a conversation, and their translation to the messages of a chat."""

import base64
import binascii
from typing import Literal

import msgspec
from msgspec import Raw

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.images import Images
from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.outline import (
    MAX_CONTENT_PARTS,
    MAX_FIELD_BYTES,
    MAX_MESSAGES,
    begins,
    decode_fields,
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
from tandem.frontend.chat.parts import IN_NEXT_MESSAGE
from tandem.frontend.responses.tools import chat_name

Status = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of an item's content: text, or an image that the model sees."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Raw = NULL


Content = str | list[Part]


class Message(msgspec.Struct, frozen=True):
    """A message of any role. Clients send back answers with all fields that they have."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] | None = "message"
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


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a custom tool."""

    call_id: str
    name: str
    input: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None


class CustomOutput(FunctionOutput, frozen=True):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"  # type: ignore[assignment]


class ReasoningItem(msgspec.Struct, frozen=True):
    """Reasoning of the model; a client may keep only `encrypted_content` of it."""

    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None
    type: Literal["reasoning"] = "reasoning"
    id: str | None = None
    status: Status | None = None

    def text(self) -> str | None:
        """Return the reasoning. None where only another server can read it."""
        if not self.content and self.encrypted_content is not None:
            try:
                return base64.b64decode(self.encrypted_content, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return text_of(self.summary) if self.summary else None
        return text_of(self.content or self.summary or [])


Item = Message | FunctionCall | FunctionOutput | CustomCall | CustomOutput | ReasoningItem
Placed = tuple[str, Item]  # with its path in the body
_IMAGE = "input_image"
_NEEDED = ("item_reference",)  # without it the conversation would be another one
_KINDS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionOutput,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": CustomOutput,
    "reasoning": ReasoningItem,
}


def encrypted(reasoning: str) -> str:
    """Return reasoning in the form that a client sends back. It is encoded, and hidden to none."""
    return base64.b64encode(reasoning.encode()).decode()


def user_message(text: Raw) -> Message:
    """Return the message of an input that is a string."""
    return Message("user", msgspec.json.decode(text, type=str))


class Reading:
    """The reading of one request's items. Those of tools of another server are left out.

    A model that `sees` gets images of the user and of tools.
    """

    def __init__(self, ignored: Ignored, *, sees: bool, images_as_text: bool = True) -> None:
        self._ignored = ignored
        self._sees = sees
        self._unseen = Unseen(ignored, as_text=images_as_text, sees=sees)

    def items(self, raw: bytes | Raw, where: str, *, are_past: bool = False) -> list[Placed]:
        """Return the items of a list. Raises InvalidRequestError naming the field."""
        raws = read_list(raw, MAX_MESSAGES, where)
        read = [self._item(each, f"{where}[{index}]") for index, each in enumerate(raws)]
        num_parts = sum(map(_num_parts, read))
        if num_parts > MAX_CONTENT_PARTS:
            raise invalid_field(
                where, f"has {num_parts} content parts, the most is {MAX_CONTENT_PARTS}"
            )
        last = max((index for index, each in enumerate(read) if _is_answer(each)), default=-1)
        last = len(read) if are_past else last
        return [
            (path := f"{where}[{index}]", self._with_parts(each, path, is_new=index > last))
            for index, each in enumerate(read)
            if each is not None
        ]

    def _item(self, raw: Raw, where: str) -> Item | None:
        name = read_type(raw, where, "message")
        kind = _KINDS.get(name)
        if kind is None:
            if name in _NEEDED or "role" in decode_fields(raw):
                raise unsupported(f"{where}.type", name)
            self._ignored.add(f"{where}.type", name)
            return None
        if len(raw) > MAX_FIELD_BYTES:
            for field, value in decode_fields(raw).items():
                if begins(value, b"["):
                    read_list(value, MAX_CONTENT_PARTS, f"{where}.{field}")
        item = read(kind, raw, where)
        if isinstance(item, ReasoningItem) and item.text() is None:
            self._ignored.add(f"{where}.encrypted_content")
            return None
        return item

    def _with_parts(self, item: Item, where: str, *, is_new: bool) -> Item:
        """Return an item whose parts are all text, or images that the model sees."""
        match item:
            case Message(content=list(parts)):
                sees = self._sees and item.role == "user"
                content = self._parts(parts, f"{where}.content", sees=sees, is_new=is_new)
                return msgspec.structs.replace(item, content=content)
            case FunctionOutput(output=list(parts)):
                output = self._parts(parts, f"{where}.output", sees=self._sees, is_new=False)
                return msgspec.structs.replace(item, output=output)
        return item

    def _parts(self, parts: list[Part], where: str, *, sees: bool, is_new: bool) -> list[Part]:
        kept = []
        for index, part in enumerate(parts):
            text = part.refusal if part.text is None else part.text
            if text is None and sees and part.type == _IMAGE:
                kept.append(Part(_IMAGE, image_url=part.image_url))
                continue
            if text is None:
                text = self._unseen.text(part.type, f"{where}[{index}]", is_new=is_new)
            kept.append(Part(part.type if part.text is not None else "input_text", text))
        return kept


def _num_parts(item: Item | None) -> int:
    match item:
        case Message(content=list(parts)) | FunctionOutput(output=list(parts)):
            return len(parts)
        case ReasoningItem():
            return len(item.content or ()) + len(item.summary or ())
    return 0


def _is_answer(item: Item | None) -> bool:
    """Return True for an item that the model has made, or another server for it."""
    match item:
        case Message(role="assistant") | FunctionCall() | CustomCall() | ReasoningItem() | None:
            return True
    return False


def text_of(content: Content) -> str:
    """Return the text of a content whose parts are text."""
    if isinstance(content, str):
        return content
    return "".join(part.text or "" for part in content)


class Conversation:
    """The messages of a chat, made of items. Items of one answer become one message.

    `images` reads those of the user, and of tools, which stand in a message behind the results.
    """

    def __init__(self, instructions: str | None, images: Images | None) -> None:
        self.messages: list[ChatMessage] = []
        self._images = images
        self._of_tools: list[ContentPart] = []
        self.origins: list[str] = []  # the path of each message's last item in the body
        if instructions is not None:
            self._append("instructions", ChatMessage("system", instructions))

    def add(self, origin: str, item: Item) -> None:
        """Add an item. Raises InvalidRequestError naming an image that cannot be read."""
        if not isinstance(item, FunctionOutput):
            self.end_results(origin)
        match item:
            case Message(role="assistant"):
                answer = self._answer_without(origin, "tool_calls", "content")
                self._put(answer, content=text_of(item.content))
            case Message():
                content = self._content(item.content, f"{origin}.content")
                self._append(origin, ChatMessage(item.role, content))
            case ReasoningItem():
                fields = ("tool_calls", "content", "reasoning_content")
                answer = self._answer_without(origin, *fields)
                self._put(answer, reasoning_content=item.text() or "")
            case FunctionCall():
                self._call(origin, item, item.arguments)
            case CustomCall():
                self._call(origin, item, msgspec.json.encode({"input": item.input}).decode())
            case FunctionOutput():
                content = self._content(item.output, f"{origin}.output")
                if isinstance(content, list):
                    seen = [part for part in content if isinstance(part, ImagePart)]
                    self._of_tools += seen
                    texts = [IN_NEXT_MESSAGE if part in seen else part.text for part in content]
                    content = "".join(text or "" for text in texts)
                self._append(origin, ChatMessage("tool", content, tool_call_id=item.call_id))

    def end_results(self, origin: str) -> None:
        """Add the images of the tools whose results came last."""
        if self._of_tools:
            self._append(origin, ChatMessage("user", self._of_tools))
            self._of_tools = []

    def _content(self, content: Content, where: str) -> str | list[ContentPart]:
        """Return a content as a chat has it: text, or parts where it has images."""
        if self._images is None or isinstance(content, str):
            return text_of(content)
        if all(part.text is not None for part in content):
            return text_of(content)
        parts: list[ContentPart] = []
        for index, part in enumerate(content):
            if part.text is not None:
                parts.append(ContentPart("text", part.text))
            else:
                field = f"{where}[{index}].image_url"
                image = self._images.of_url(part.image_url, field)
                parts.append(ImagePart("image", data=image, field=field))
        return parts

    def _append(self, origin: str, message: ChatMessage) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def _put(self, message: ChatMessage, **fields: object) -> None:
        """Put the last message, with these fields, in its place."""
        self.messages[-1] = msgspec.structs.replace(message, **fields)

    def _call(self, origin: str, item: FunctionCall | CustomCall, arguments: str) -> None:
        function = CalledFunction(chat_name(item.namespace, item.name), arguments)
        call = MessageToolCall(id=item.call_id, type="function", function=function)
        answer = self._answer_without(origin)
        if answer.tool_calls is None:
            self._put(answer, tool_calls=[call])
        else:
            answer.tool_calls.append(call)

    def _answer_without(self, origin: str, *fields: str) -> ChatMessage:
        """Return the answer that ends the chat so far. It is a new one if that has a field."""
        last = self.messages[-1] if self.messages else None
        if (
            last is None
            or last.role != "assistant"
            or any(getattr(last, name) is not None for name in fields)
        ):
            self._append(origin, last := ChatMessage("assistant"))
        self.origins[-1] = origin
        return last
