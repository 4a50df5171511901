"""The messages of a chat, checked, and as a chat template takes them."""

from typing import Any, Literal

import msgspec

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.typed import NULL
from tandem.frontend.tokens.chat_forms import with_reasoning
from tandem.runtime.printable import short

TemplateMessage = dict[str, Any]


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content, as a body has it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = NULL


class ImagePart(ContentPart, frozen=True):
    """An image that the model sees; its bytes go to the worker beside the prompt."""

    data: bytes = b""
    field: str = ""  # its path in the body


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function of a call; its arguments are the text that the model wrote."""

    name: str
    arguments: str | None = None


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an assistant's message. Its id and name are those that a model wrote."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None  # the older form of `tool_calls`
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name of `reasoning_content` at other servers

    def text(self, where: str) -> str:
        """Return the content with its text parts joined.

        Raises InvalidRequestError naming the field.
        """
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":
                return ""
            raise invalid_field(f"{where}.content", "is required")
        for index, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                field = f"{where}.content[{index}].type"
                raise invalid_field(field, f"is {short(part.type)!r}; only text is supported")
        return "".join(part.text or "" for part in self.content)

    @property
    def images(self) -> list[ImagePart]:
        """The images of the content, in its order."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part for part in parts if isinstance(part, ImagePart)]

    def _shown(self, where: str) -> str | list[dict[str, str]]:
        """Return the content for a chat template: parts where it has images, else text."""
        if not isinstance(self.content, list) or not self.images:
            return self.text(where)
        return [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text or ""}
            for part in self.content
        ]

    def for_template(self, where: str) -> TemplateMessage:
        """Return the message for a chat template, which knows a developer as system.

        The arguments of calls are text. Raises InvalidRequestError naming the field.
        """
        role = "system" if self.role == "developer" else self.role
        message: TemplateMessage = {"role": role, "content": self._shown(where)}
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
            if self.name is not None:
                message["name"] = self.name
        elif self.role == "assistant":
            message = self._answer(message)
        self._check_role(where)
        return message

    def _answer(self, message: TemplateMessage) -> TemplateMessage:
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message = with_reasoning(message, reasoning)
        if not self.tool_calls:
            return message
        calls = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments or "",
                },
            }
            for call in self.tool_calls
        ]
        return message | {"tool_calls": calls}

    def _check_role(self, where: str) -> None:
        """Raise InvalidRequestError for a field that only messages of another role have."""
        answer_only = ("tool_calls", "reasoning_content", "reasoning")
        for name in answer_only if self.role != "assistant" else ():
            if getattr(self, name):
                field = f"{where}.{name}"
                raise invalid_field(field, f"is for the role 'assistant', not {self.role!r}")
        if self.tool_call_id is not None and self.role != "tool":
            field = f"{where}.tool_call_id"
            raise invalid_field(field, f"is for the role 'tool', not {self.role!r}")
