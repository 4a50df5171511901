"""Payloads that no process of a cluster sends, made from the types of those that they do send."""

import random
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tandem.runtime.wire.bounds import Message

NESTED = [
    *(b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"[" * 100_000, b'{"a":' * 100_000),
    b"\x82\xa4type\xa5Claim\xaahandoff_id" + b"\x91" * 100_000,
]
WRONG: list[Any] = [-(2**63), {"a": [None]}, "x" * 70_000]
ODD = [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"{}", b"\x80", b"\xc0", b"\x93\x01\x02\x03"]


def every_message() -> list[type[Message]]:
    """All messages of the modules that are loaded."""
    found: list[type[Message]] = []
    waiting: list[type[Message]] = [Message]
    while waiting:
        found += (kinds := waiting.pop().__subclasses__())
        waiting += kinds
    return [kind for kind in found if kind.__module__.startswith("tandem.")]


def garbage(seed: int = 5, number: int = 40) -> list[bytes]:
    """Bytes that are no message at all."""
    draw = random.Random(seed)
    drawn = [draw.randbytes(draw.choice((1, 3, 40, 900))) for _ in range(number)]
    return [*ODD, *NESTED, *drawn]


def wrong_messages() -> Iterator[list[bytes]]:
    """For each tagged message: as it should be, then with each of its fields of a wrong kind."""
    for kind in every_message():
        tag = kind.__struct_config__.tag
        if isinstance(tag, str):
            right = {"type": tag, **example(kind)}
            changed = [{name: wrong} for name in kind.__struct_fields__ for wrong in WRONG]
            yield [msgspec.msgpack.encode(right | each) for each in ({}, *changed)]


def example(kind: type[Message]) -> dict[str, Any]:
    """The fields of a message at their least."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: least(hints[name]) for name in kind.__struct_fields__}


def least(hint: Any, meta: msgspec.Meta | None = None) -> Any:
    """The least value of a field's type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return least(hint.__origin__, hint.__metadata__[0])
    if origin in (Union, UnionType):
        return least(args[0])
    if origin is Literal:
        return args[0]
    if origin is tuple:
        return [least(each) for each in args]
    if origin in (list, dict):
        return origin()
    if isinstance(hint, type) and issubclass(hint, Message):
        return {"type": hint.__struct_config__.tag, **example(hint)}
    if hint in (int, float) and meta is not None:
        return max(0, meta.ge or 0) if meta.gt is None else 1
    size = 0 if meta is None else meta.min_length or 0
    return {str: "", bytes: bytes(size), bool: False, NoneType: None}.get(hint)
