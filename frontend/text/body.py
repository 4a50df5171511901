"""Bodies for models that read text themselves, checked only as far as the frontend reads them."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

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
    except (msgspec.DecodeError, msgspec.ValidationError):
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
    body = read_object(raw, "the body", InvalidRequestError)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequestError("`model` must be a string", param="model")
    if route == "chat":
        _check_messages(body.get("messages"))
    else:
        _check_prompt(body.get("prompt"))
    stream = body.get("stream")
    if not isinstance(stream, bool | None):
        raise InvalidRequestError("`stream` must be true or false", param="stream")
    return TextBody(model, route, bool(stream), _include_usage(body, bool(stream)), raw)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("`messages` must be a list, and not empty", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f"`{where}` must be an object", param=where)
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"`{where}.role` must be a string", param=f"{where}.role")


def _check_prompt(prompt: object) -> None:
    if not isinstance(prompt, str | list) or prompt == []:
        raise InvalidRequestError(
            "`prompt` must be a string or a list that is not empty", param="prompt"
        )


def _include_usage(body: dict[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
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
