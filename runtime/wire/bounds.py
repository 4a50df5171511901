"""The base of wire messages, and the bounds of their fields by name.

A peer's numbers go into arithmetic, its texts into logs and its lists into memory, so each field of
a message has a bound where it is declared (`tests/runtime/wire/test_message_bounds.py` looks at all
of them). The bounds are wide: they exclude what no member of a cluster can mean, and no float of
them is infinite or not a number. Whoever sends a text of others cuts it by `MAX_TEXT`.
"""

from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

T = TypeVar("T")

MAX_COUNT = 2**48  # products of three are finite floats
MAX_SECONDS = 3600
MAX_NAME = 1024  # characters
MAX_TEXT = 2**16  # characters
LARGEST_INT = 2**31 - 1  # of a request's parameters
LEAST_REPETITION_PENALTY = 0.01
LARGEST_REAL = 1e6  # logits that are multiplied by it, or it by a count, stay finite in float32
_LARGEST_FLOAT = 1e300
_U64 = {"maximum": 2**64 - 1}  # msgpack has no larger one, and msgspec no bound above 2**63 - 1
_ALL_IN_ONE = {"bound": "the bytes that carry it, and the nesting that the decoder takes"}

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # of tokens, blocks, bytes, milliseconds, ...
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Ordinal = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # of a block, an attempt, a device
NumRanks = Annotated[int, Meta(ge=1, le=4096)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0, extra_json_schema=_U64)]
Integer = Annotated[int, Meta(ge=-(2**63), extra_json_schema=_U64)]  # any that msgpack has
Amount = Annotated[float, Meta(ge=0, le=_LARGEST_FLOAT)]  # of milliseconds, bytes per second, ...
Real = Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]  # of a step, of a wait

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Id = Annotated[bytes, Meta(max_length=64)]  # or a hash, or a secret
Payload = Annotated[bytes, Meta(max_length=2**26)]

Few = Annotated[list[T], Meta(max_length=4096)]
Many = Annotated[list[T], Meta(max_length=2**23)]  # tokens of a prompt, blocks of a cache
Table = Annotated[dict[Name, T], Meta(max_length=4096)]
Value = Annotated[Any, Meta(extra=_ALL_IN_ONE)]  # any plain value


class Message(Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all wire messages; the tag is the class name."""
