"""Typed structs from the JSON of a client. Errors name the field at fault by its path."""

import re
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.outline import (
    MAX_FIELD_BYTES,
    Fields,
    check_num_fields,
    check_size,
    decode_fields,
    is_null,
    read_fields,
)
from tandem.runtime.bounds import LARGEST_INT
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.printable import one_line, short

T = TypeVar("T", bound=msgspec.Struct)
Count = Annotated[int, Meta(ge=1, le=LARGEST_INT)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST_INT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Effort = Annotated[str, Meta(max_length=64)]  # of reasoning
NULL = msgspec.Raw(b"null")  # a field of any type that is not there
_MAX_REASON_BYTES = 200
_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)


def read_body(kind: type[T], raw: bytes, large: Collection[str]) -> T:
    """Return the struct in the body `raw`; see `read_body_fields`."""
    read_body_fields(kind, raw, large)
    return decoded(kind, raw)


def read_body_fields(kind: type[msgspec.Struct], raw: bytes, large: Collection[str]) -> Fields:
    """Return the fields of a body, as JSON.

    Raises InvalidRequestError naming one that `kind` does not have and that is not null, or that
    is larger than its bound and not one of `large`.
    """
    fields = read_fields(raw)
    _check_names(fields, kind, "")
    if len(raw) > MAX_FIELD_BYTES:
        for name, value in fields.items():
            if name not in large:
                check_size(name, value)
    return fields


def read(kind: type[T], raw: bytes | msgspec.Raw, where: str) -> T:
    """Return the struct in `raw`, which has no other fields than `kind` unless they are null.

    `where` is the path of `raw` in the body. Raises InvalidRequestError naming the field.
    """
    try:
        fields = decode_fields(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _named(error, where) from error
    check_num_fields(fields, where)
    _check_names(fields, kind, where)
    return decoded(kind, raw, where)


def decoded(kind: type[T], raw: bytes | msgspec.Raw, where: str = "") -> T:
    """Return the struct in `raw`, whose other fields are ignored.

    Raises InvalidRequestError naming the field.
    """
    try:
        return cast(T, _decoder(kind).decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _named(error, where) from error


def _check_names(fields: Fields, kind: type[msgspec.Struct], where: str) -> None:
    for name in fields.keys() - _names(kind):
        if not is_null(fields[name]):
            raise unsupported(f"{where}.{short(name)}" if where else short(name))


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


def _named(error: Exception, where: str) -> InvalidRequestError:
    """Return the error of a message such as "Expected `str`, got `int` - at `$.model`"."""
    if not isinstance(error, msgspec.ValidationError):
        name = f"`{where}`" if where else "the body"
        return InvalidRequestError(f"{name} is not JSON: {error}", param=where or None)
    found = _PATH.match(str(error))
    assert found is not None
    path = (where + (found["path"] or "")).removeprefix(".")
    if (missing := _MISSING.match(found["reason"])) is not None:
        field = f"{path}.{missing[1]}".removeprefix(".")
        return invalid_field(field, "is required")
    if (unknown := _UNKNOWN.match(found["reason"])) is not None:
        return unsupported(f"{path}.{short(unknown[1])}".removeprefix("."))
    reason = one_line(found["reason"].replace("`", ""), _MAX_REASON_BYTES)
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
        raise _named(error, where) from error
    if found is None:
        raise invalid_field(f"{where}.type", "is required")
    return found


_decode_typed = msgspec.json.Decoder(_Typed).decode
