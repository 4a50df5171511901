"""Null is the same as a field that is left out, at every level of a body."""

from functools import cache

import msgspec
from msgspec import Raw, inspect

from tandem.frontend.bodies.outline import begins, decode_fields, is_null

_encode = msgspec.json.Encoder().encode
_decode_list = msgspec.json.Decoder(list[Raw]).decode


def without_nulls(kind: type[msgspec.Struct], raw: bytes | Raw) -> bytes:
    """Return the JSON of a struct without the nulls that its types do not take.

    Anything of no type, such as a schema, stays as it is. Raises msgspec.DecodeError.
    """
    return bytes(_without(Raw(raw), _type_of(kind)))


@cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _without(raw: Raw, kind: inspect.Type) -> Raw:
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            raw = _without(raw, each)
    elif isinstance(kind, inspect.StructType) and begins(raw, b"{"):
        types = {field.encode_name: field.type for field in kind.fields}
        return Raw(
            _encode(
                {
                    name: _without(value, types[name]) if name in types else value
                    for name, value in decode_fields(raw).items()
                    if not is_null(value) or (name in types and _takes_null(types[name]))
                }
            )
        )
    elif isinstance(kind, inspect.ListType) and begins(raw, b"["):
        return Raw(_encode([_without(each, kind.item_type) for each in _decode_list(raw)]))
    return raw


def _takes_null(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(_takes_null, kind.types))
    return isinstance(kind, inspect.NoneType | inspect.AnyType | inspect.RawType)
