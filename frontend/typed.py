"""Typed structs from the JSON of a client. Errors name the field at fault by its path."""

import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from tandem.frontend.openai.outline import MAX_FIELDS, Fields, decode_fields
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.printable import short

T = TypeVar("T", bound=msgspec.Struct)
NULL = msgspec.Raw(b"null")  # a field of any type that is not there
_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")


def read(kind: type[T], raw: bytes | msgspec.Raw, where: str = "") -> T:
    """Return the struct in `raw`, which has no other fields than `kind` unless they are null.

    `where` is the path of `raw` in the body. Raises InvalidRequestError naming the field.
    """
    try:
        fields = decode_fields(raw)
        check_names(fields, kind, where)
        return cast(T, _decoder(kind).decode(raw))
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = where or "the body"
        raise InvalidRequestError(f"`{name}` is not JSON: {error}", param=where or None) from error


def check_names(fields: Fields, kind: type[msgspec.Struct], where: str = "") -> None:
    """Raise InvalidRequestError naming a field that `kind` does not have and that is not null."""
    if len(fields) > MAX_FIELDS:
        raise InvalidRequestError(
            f"`{where or 'the body'}` has {len(fields)} fields, the most is {MAX_FIELDS}",
            param=where or None,
        )
    for name in fields.keys() - _names(kind):
        if bytes(fields[name]) != b"null":
            raise unsupported(f"{where}.{short(name)}" if where else short(name))


def unsupported(field: str, value: str | None = None) -> InvalidRequestError:
    """Return the error for a field, or for one value of it, that has no support."""
    if value is None:
        return InvalidRequestError(f"`{field}` is not supported", param=field)
    message = f"`{field}` is {short(value)!r}, which is not supported"
    return InvalidRequestError(message, param=field)


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    tag = kind.__struct_config__.tag_field
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    return frozenset(names | {tag} if tag else names)


def _named(text: str, where: str) -> InvalidRequestError:
    """Return the error of a text such as "Expected `str`, got `int` - at `$.model`"."""
    found = _PATH.match(text)
    assert found is not None
    path = (where + (found["path"] or "")).removeprefix(".")
    missing = _MISSING.match(found["reason"])
    if missing is not None:
        field = f"{path}.{missing[1]}".removeprefix(".")
        return InvalidRequestError(f"`{field}` is required", param=field)
    reason = found["reason"].replace("`", "")
    if not path:
        return InvalidRequestError(f"the body: {reason}")
    return InvalidRequestError(f"`{path}`: {reason}", param=path)


class _Typed(msgspec.Struct):
    """An object of which only the type is known."""

    type: str | None = None


def read_type(raw: msgspec.Raw, where: str, default: str | None = None) -> str:
    """Return the `type` of an object. Raises InvalidRequestError naming the field."""
    try:
        found = _decode_typed(raw).type or default
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from error
    if found is None:
        raise InvalidRequestError(f"`{where}.type` is required", param=f"{where}.type")
    return found


_decode_typed = msgspec.json.Decoder(_Typed).decode
