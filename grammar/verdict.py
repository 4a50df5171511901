"""The messages between a worker and its process of trials, and their frames."""

import struct

import msgspec

from tandem.runtime.wire.messages import Grammar

LENGTH = struct.Struct("<I")


class Order(msgspec.Struct, array_like=True):
    """A trial to begin; without a grammar, one to end."""

    id: int
    grammar: Grammar | None = None


class Verdict(msgspec.Struct, array_like=True):
    """The result of a trial: the source of llguidance's matcher, or the fault of the grammar."""

    id: int
    source: str = ""
    fault: str = ""
    field: str = "grammar"  # at fault
    is_broken: bool = False  # the grammar has ended its process


def framed(message: msgspec.Struct) -> bytes:
    """Return a message with its length before it."""
    payload = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(payload)) + payload
