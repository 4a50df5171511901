"""What travels as a transfer notification: fixed headers, pure functions.

```
0   4  magic "TNDM"           28  4  sequence number     (settled: writes completed)
4   1  version                32  4  writes in all, or 0 (settled: writes failed)
5   1  kind                   36  4  count of blocks     (settled: 0)
6   2  zero                   40  16 secret
8   16 handoff id             56  12 per block: u32 ordinal, u64 checksum
24  4  attempt                    (all little-endian)
```
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"TNDM"
VERSION = 1
KIND_LANDED = 1
KIND_SETTLED = 2
ID_BYTES = 16
SECRET_BYTES = 16

_HEADER = struct.Struct("<4sBBH16sIIII16s")
_BLOCK = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Landed:
    """One write is complete: these ordinals hold data with these checksums."""

    handoff_id: bytes
    attempt: int
    secret: bytes
    sequence_number: int
    num_writes: int  # of the whole handoff; 0 when P does not know yet
    blocks: tuple[tuple[int, int], ...]  # (ordinal, checksum)


@dataclass(frozen=True, slots=True)
class SettledNotice:
    """The transfer plane's copy of the message `Settled`."""

    handoff_id: bytes
    attempt: int
    secret: bytes
    num_completed: int
    num_failed: int


def encode_landed(
    handoff_id: bytes,
    attempt: int,
    secret: bytes,
    sequence_number: int,
    num_writes: int,
    blocks: Sequence[tuple[int, int]],
) -> bytes:
    """The notice of one write; `num_writes` is the handoff's number of writes, or 0."""
    header = _pack(
        KIND_LANDED, handoff_id, attempt, secret, sequence_number, num_writes, len(blocks)
    )
    return header + b"".join(_BLOCK.pack(ordinal, checksum) for ordinal, checksum in blocks)


def encode_settled(
    handoff_id: bytes, attempt: int, secret: bytes, num_completed: int, num_failed: int
) -> bytes:
    """The notice that no write of this attempt can land any more."""
    return _pack(KIND_SETTLED, handoff_id, attempt, secret, num_completed, num_failed, 0)


def decode_landed(data: bytes) -> Landed | None:
    """The notice in `data`, or None for anything else. The secret is not judged here."""
    fields = _unpack(data, KIND_LANDED)
    if fields is None:
        return None
    handoff_id, attempt, sequence_number, num_writes, count, secret = fields
    if len(data) != _HEADER.size + count * _BLOCK.size or count == 0:
        return None
    blocks = tuple(_BLOCK.iter_unpack(memoryview(data)[_HEADER.size :]))
    return Landed(handoff_id, attempt, secret, sequence_number, num_writes, blocks)


def decode_settled(data: bytes) -> SettledNotice | None:
    """The notice in `data`, or None for anything else. The secret is not judged here."""
    fields = _unpack(data, KIND_SETTLED)
    if fields is None:
        return None
    handoff_id, attempt, num_completed, num_failed, count, secret = fields
    if len(data) != _HEADER.size or count != 0:
        return None
    return SettledNotice(handoff_id, attempt, secret, num_completed, num_failed)


def _pack(
    kind: int, handoff_id: bytes, attempt: int, secret: bytes, first: int, second: int, count: int
) -> bytes:
    assert len(handoff_id) == ID_BYTES and len(secret) == SECRET_BYTES
    return _HEADER.pack(MAGIC, VERSION, kind, 0, handoff_id, attempt, first, second, count, secret)


def _unpack(data: bytes, kind: int) -> tuple[bytes, int, int, int, int, bytes] | None:
    if len(data) < _HEADER.size:
        return None
    magic, version, its_kind, zero, *fields = _HEADER.unpack_from(data)
    if (magic, version, its_kind, zero) != (MAGIC, VERSION, kind, 0):
        return None
    handoff_id, attempt, first, second, count, secret = fields
    return handoff_id, attempt, first, second, count, secret
