"""Bodies for models that read text themselves, checked only as far as the frontend reads them."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem.frontend.openai.outline import (
    MAX_FIELD_BYTES,
    Fields,
    begins,
    read_fields,
    read_messages,
)
from tandem.runtime.errors import InvalidRequestError, TandemError

Route = Literal["chat", "completions"]


class _Named(msgspec.Struct):
    """The part of a body that is read before its kind is known."""

    model: str


@dataclass(frozen=True, slots=True)
class TextBody:
    """A body as the client sent it, and the fields that the frontend reads."""

    model: str
    route: Route
    stream: bool
    include_usage: bool
    raw: bytes


_decode_named = msgspec.json.Decoder(_Named).decode
_decode = msgspec.json.Decoder().decode


def model_named_in(raw: bytes) -> str | None:
    """Return the model that a body asks for; None if it is not a body that names one."""
    try:
        return _decode_named(raw).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_object(raw: bytes, name: str, error_type: type[TandemError]) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises `error_type`, which calls it `name`."""
    try:
        decoded: object = _decode(raw)
    except msgspec.DecodeError as error:
        raise error_type(f"{name} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise error_type(f"{name} must be a JSON object")
    return decoded


def parse_text(route: Route, raw: bytes) -> TextBody:
    """Return the checked body in `raw`. Raises InvalidRequestError naming the field."""
    fields = read_fields(raw)
    model = _value(fields, "model")
    if not isinstance(model, str):
        raise InvalidRequestError("`model` must be a string", param="model")
    if route == "chat":
        _check_messages(fields.get("messages", msgspec.Raw(b"null")))
    else:
        _check_prompt(fields.get("prompt", msgspec.Raw(b"null")))
    stream = _value(fields, "stream")
    if not isinstance(stream, bool | None):
        raise InvalidRequestError("`stream` must be true or false", param="stream")
    include_usage = _include_usage(_value(fields, "stream_options"), bool(stream))
    return TextBody(model, route, bool(stream), include_usage, raw)


def _value(fields: Fields, name: str) -> object:
    """Return the value of a small field; None where it is missing."""
    raw = fields.get(name)
    if raw is None:
        return None
    if len(raw) > MAX_FIELD_BYTES:
        raise InvalidRequestError(f"`{name}` is over {MAX_FIELD_BYTES} bytes", param=name)
    try:
        value: object = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"`{name}` is not JSON: {error}", param=name) from error
    return value


def _check_messages(messages: msgspec.Raw) -> None:
    for index, message in enumerate(read_messages(messages)):
        if not begins(message.get("role", msgspec.Raw()), b'"'):
            where = f"messages[{index}].role"
            raise InvalidRequestError(f"`{where}` must be a string", param=where)


def _check_prompt(prompt: msgspec.Raw) -> None:
    is_list = begins(prompt, b"[") and memoryview(prompt)[1:].tobytes().strip() != b"]"
    if not begins(prompt, b'"') and not is_list:
        raise InvalidRequestError(
            "`prompt` must be a string or a list that is not empty", param="prompt"
        )


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidRequestError(
            "`stream_options` is only allowed when `stream` is true", param="stream_options"
        )
    wanted = options.get("include_usage") if isinstance(options, dict) else 0
    if not isinstance(wanted, bool | None):
        raise InvalidRequestError(
            "`stream_options.include_usage` must be true or false",
            param="stream_options.include_usage",
        )
    return bool(wanted)
