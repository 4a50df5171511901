"""Typed structs from the JSON of a client. Errors name the field at fault by its path."""

import re
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.nulls import without_nulls
from tandem.frontend.bodies.outline import (
    MAX_FIELD_BYTES,
    Fields,
    check_num_fields,
    check_size,
    decode_fields,
    is_null,
    read_fields,
)
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.printable import one_line, short
from tandem.runtime.wire.bounds import LARGEST_INT

T = TypeVar("T", bound=msgspec.Struct)
B = TypeVar("B", bound="Body")
Count = Annotated[int, Meta(ge=1, le=LARGEST_INT)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST_INT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Effort = Annotated[str, Meta(max_length=64)]  # of reasoning
NULL = msgspec.Raw(b"null")  # a field of any type that is not there
_MAX_REASON_BYTES = 200
_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The base of bodies. Fields beside those of the struct are ignored, and named.

    A body may have those of `no_effect` in any form: clients of one API or another send them, and
    they change nothing here. Without those of `refused` an answer would be another one than its
    caller expects, and so it would without those of `switches` where they are on.
    """

    no_effect: ClassVar[frozenset[str]] = frozenset(
        (
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "prompt_cache_options", "verbosity", "prediction",
            "truncation", "client_metadata", "max_tool_calls", "cache_control", "speed", "priority",
            "length_penalty", "spaces_between_special_tokens", "guided_decoding_backend",
        )
    )  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(
        ("suffix", "audio", "chat_template", "conversation", "prompt", "container")
    )
    switches: ClassVar[frozenset[str]] = frozenset(("background", "use_beam_search"))


def read_body(kind: type[B], raw: bytes, large: Collection[str], ignored: Ignored) -> B:
    """Return the struct in the body `raw`; see `read_body_fields`."""
    read_body_fields(kind, raw, large, ignored)
    return decoded(kind, raw)


def read_body_fields(
    kind: type[Body], raw: bytes, large: Collection[str], ignored: Ignored
) -> Fields:
    """Return the fields of a body, as JSON. Adds those that `kind` does not have to `ignored`.

    Raises InvalidRequestError naming one that is refused and not null, or that is larger than its
    bound and not one of `large`.
    """
    fields = read_fields(raw)
    if not _taken(kind).issuperset(fields):
        _leave_out_others(kind, fields, ignored)
    if len(raw) > MAX_FIELD_BYTES:
        for name, value in fields.items():
            if name not in large:
                check_size(name, value)
    return fields


def _leave_out_others(kind: type[Body], fields: Fields, ignored: Ignored) -> None:
    for name in fields.keys() - _taken(kind):
        is_off = name in kind.switches and bytes(fields[name]) == b"false"
        if is_off or is_null(fields[name]):
            continue
        if name in kind.refused or name in kind.switches:
            raise unsupported(name)
        ignored.add(short(name))


def read(kind: type[T], raw: bytes | msgspec.Raw, where: str) -> T:
    """Return the struct in `raw`. Other fields in it are notes of the client, and ignored.

    `where` is the path of `raw` in the body. Raises InvalidRequestError naming the field.
    """
    try:
        fields = decode_fields(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _named(error, where) from error
    check_num_fields(fields, where)
    return decoded(kind, raw, where)


def decoded(kind: type[T], raw: bytes | msgspec.Raw, where: str = "") -> T:
    """Return the struct in `raw`, whose other fields are ignored.

    Raises InvalidRequestError naming the field.
    """
    decode = _decoder(kind).decode
    try:
        try:
            return cast(T, decode(raw))
        except msgspec.ValidationError:
            if b"null" not in bytes(raw):
                raise
            return cast(T, decode(without_nulls(kind, raw)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _named(error, where) from error


def read_schema(raw: msgspec.Raw, where: str) -> dict[str, Any] | None:
    """Return a JSON schema; None for null. Raises InvalidRequestError naming `where`."""
    try:
        return cast(dict[str, Any] | None, _decode_schema(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _named(error, where) from error


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _taken(kind: type[Body]) -> frozenset[str]:
    return kind.no_effect.union(kind.__struct_encode_fields__)


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
_decode_schema = msgspec.json.Decoder(dict[str, Any] | None).decode
