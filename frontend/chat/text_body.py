"""Bodies for models that read text themselves, checked only as far as the frontend reads them."""

from typing import Literal

import msgspec

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import begins, check_size, read_fields, read_messages
from tandem.frontend.bodies.typed import NULL, decoded

Route = Literal["chat", "completions"]
_SMALL = ("model", "stream", "stream_options")


class _Named(msgspec.Struct):
    """The part of a body that is read before its kind is known."""

    model: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Fields(msgspec.Struct):
    """The fields that the frontend reads; the others are the worker's."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


class TextBody(msgspec.Struct, frozen=True):
    """A body as the client sent it, and the fields that the frontend reads."""

    model: str
    route: Route
    stream: bool
    include_usage: bool
    raw: bytes


_decode_named = msgspec.json.Decoder(_Named).decode


def model_named_in(raw: bytes) -> str | None:
    """Return the model that a body asks for; None if it is not a body that names one."""
    try:
        return _decode_named(raw).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parse_text(route: Route, raw: bytes) -> TextBody:
    """Return the checked body in `raw`. Raises InvalidRequestError naming the field."""
    for name, value in read_fields(raw).items():
        if name in _SMALL:
            check_size(name, value)
    fields = decoded(_Fields, raw)
    if route == "chat":
        _check_messages(fields.messages)
    else:
        _check_prompt(fields.prompt)
    stream, options = bool(fields.stream), fields.stream_options
    if options is not None and not stream:
        raise invalid_field("stream_options", "is only allowed when `stream` is true")
    include_usage = options is not None and bool(options.include_usage)
    return TextBody(fields.model, route, stream, include_usage, raw)


def _check_messages(messages: msgspec.Raw) -> None:
    for index, message in enumerate(read_messages(messages)):
        if not begins(message.get("role", msgspec.Raw()), b'"'):
            where = f"messages[{index}].role"
            raise invalid_field(where, "must be a string")


def _check_prompt(prompt: msgspec.Raw) -> None:
    is_list = begins(prompt, b"[") and memoryview(prompt)[1:].tobytes().strip() != b"]"
    if not begins(prompt, b'"') and not is_list:
        raise invalid_field("prompt", "must be a string or a list that is not empty")
