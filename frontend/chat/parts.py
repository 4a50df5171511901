"""Parts of messages that are no text, and the text in their place."""

import msgspec

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.unseen import Unseen
from tandem.frontend.chat.messages import ChatMessage, ContentPart


def with_text_parts(
    messages: list[ChatMessage], ignored: Ignored, *, images_as_text: bool
) -> list[ChatMessage]:
    """Return messages whose parts are text. Raises InvalidRequestError naming another part.

    Images and files have a line of text in their place, but for those of a new message. Other parts
    of an answer are another server's, and left out.
    """
    unseen = Unseen(ignored, as_text=images_as_text)
    answers = (index for index, each in enumerate(messages) if each.role == "assistant")
    last = max(answers, default=-1)

    def text_of(part: ContentPart, role: str, field: str, *, is_new: bool) -> str | None:
        if part.text is not None or part.refusal is not None:
            return part.text if part.text is not None else part.refusal
        if part.type == "text":
            raise invalid_field(f"{field}.text", "is required")
        if role != "assistant":
            return unseen.text(part.type, field, is_new=is_new and role != "tool")
        ignored.add(f"{field}.type", part.type)
        return None

    def as_text(index: int, message: ChatMessage) -> ChatMessage:
        if is_text(message):
            return message
        assert isinstance(message.content, list)
        field, is_new = f"messages[{index}].content", index > last
        texts = [
            text_of(part, message.role, f"{field}[{number}]", is_new=is_new)
            for number, part in enumerate(message.content)
        ]
        parts = [ContentPart("text", text) for text in texts if text is not None]
        return msgspec.structs.replace(message, content=parts)

    return [as_text(index, message) for index, message in enumerate(messages)]


def is_text(message: ChatMessage) -> bool:
    """Return True if all parts of a message are text."""
    if not isinstance(message.content, list):
        return True
    return all(part.type == "text" and part.text is not None for part in message.content)
