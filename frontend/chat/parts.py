"""Parts of messages that are no text: images that the model sees, and text in place of others."""

import msgspec

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.images import Images
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.unseen import Unseen
from tandem.frontend.chat.messages import ChatMessage, ContentPart, ImagePart

IN_NEXT_MESSAGE = "[image: in the next message of the user]"  # in the result of a tool


def content_of(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return the content of a message of these parts: text where they have no image."""
    content: list[ContentPart] = []
    for part in parts:
        if content and part.type == content[-1].type == "text":
            content[-1] = ContentPart("text", f"{content[-1].text}\n\n{part.text}")
        else:
            content.append(part)
    if not any(isinstance(part, ImagePart) for part in content):
        return "".join(part.text or "" for part in content)
    return content


def with_read_parts(
    messages: list[ChatMessage], ignored: Ignored, images: Images | None, *, images_as_text: bool
) -> list[ChatMessage]:
    """Return messages whose parts are text, and images of the user if the model sees `images`.

    Other images and files have a line of text in their place, but for those of a new message. Other
    parts of an answer are another server's, and left out. Raises InvalidRequestError naming a part.
    """
    unseen = Unseen(ignored, as_text=images_as_text, sees=images is not None)
    answers = (index for index, each in enumerate(messages) if each.role == "assistant")
    last = max(answers, default=-1)

    def read(part: ContentPart, role: str, field: str, *, is_new: bool) -> ContentPart | None:
        if part.text is not None or part.refusal is not None:
            return ContentPart("text", part.refusal if part.text is None else part.text)
        if part.type == "text":
            raise invalid_field(f"{field}.text", "is required")
        if part.type == "image_url" and role == "user" and images is not None:
            field = f"{field}.image_url"
            return ImagePart("image", data=images.of_url(part.image_url, field), field=field)
        if role != "assistant":
            text = unseen.text(part.type, field, is_new=is_new and role != "tool")
            return ContentPart("text", text)
        ignored.add(f"{field}.type", part.type)
        return None

    def with_parts(index: int, message: ChatMessage) -> ChatMessage:
        if is_text(message):
            return message
        assert isinstance(message.content, list)
        field, is_new = f"messages[{index}].content", index > last
        parts = [
            read(part, message.role, f"{field}[{number}]", is_new=is_new)
            for number, part in enumerate(message.content)
        ]
        kept = [part for part in parts if part is not None]
        return msgspec.structs.replace(message, content=kept)

    return [with_parts(index, message) for index, message in enumerate(messages)]


def is_text(message: ChatMessage) -> bool:
    """Return True if all parts of a message are text."""
    if not isinstance(message.content, list):
        return True
    return all(part.type == "text" and part.text is not None for part in message.content)
