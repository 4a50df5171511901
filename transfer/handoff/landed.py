"""The notifications of the transfer plane: fixed headers, pure functions.

```
0   4  magic "TNDM"           28  4  sequence number     (settled: writes completed)
4   1  version                32  4  count of blocks     (settled: writes failed)
5   1  kind                   36  2  first layer         (settled: 0)
6   2  rank of the sender     38  2  end of the layers   (settled: 0)
8   16 handoff id             40  16 secret
24  4  attempt                56  12 per block: u32 ordinal, u64 checksum
```

All little-endian.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.transfer.agents.rank_agent import NOTICE_BLOCK, Notice

MAGIC = b"TNDM"
VERSION = 2
KIND_LANDED = 1
KIND_SETTLED = 2
ID_BYTES = 16
SECRET_BYTES = 16

_HEADER = struct.Struct("<4sBBH16sIIIHH16s")


@dataclass(frozen=True, slots=True)
class Landed:
    """One write of one rank is complete: these layers of these ordinals have these checksums."""

    handoff_id: bytes
    attempt: int
    secret: bytes
    prefill_rank: int
    sequence_number: int
    layers: range
    blocks: tuple[tuple[int, int], ...]  # (ordinal, checksum)


@dataclass(frozen=True, slots=True)
class SettledNotice:
    """The transfer plane's copy of the message `Settled`."""

    handoff_id: bytes
    attempt: int
    secret: bytes
    num_completed: int
    num_failed: int


def encode_landed(landed: Landed) -> bytes:
    """Return the notice that is sent with a write."""
    notice = landed_notice(landed, [ordinal for ordinal, _ in landed.blocks])
    return notice([checksum for _, checksum in landed.blocks])


def landed_notice(landed: Landed, ordinals: Sequence[int]) -> Notice:
    """Return the notice of a write of `ordinals`, in place of the blocks of `landed`."""
    rank, number = landed.prefill_rank, landed.sequence_number
    return Notice(_pack(KIND_LANDED, landed, rank, number, len(ordinals), landed.layers), ordinals)


def encode_settled(settled: SettledNotice) -> bytes:
    """Return the notice that no write of this attempt can land any more."""
    return _pack(KIND_SETTLED, settled, 0, settled.num_completed, settled.num_failed, range(0))


def decode_landed(data: bytes) -> Landed | None:
    """Return the notice in `data`, or None for anything else. The secret is not checked here."""
    fields = _unpack(data, KIND_LANDED)
    if fields is None:
        return None
    rank, handoff_id, attempt, sequence_number, count, begin, end, secret = fields
    if len(data) != _HEADER.size + count * NOTICE_BLOCK.size or count == 0 or begin >= end:
        return None
    blocks = tuple(NOTICE_BLOCK.iter_unpack(memoryview(data)[_HEADER.size :]))
    return Landed(handoff_id, attempt, secret, rank, sequence_number, range(begin, end), blocks)


def decode_settled(data: bytes) -> SettledNotice | None:
    """Return the notice in `data`, or None for anything else. The secret is not checked here."""
    fields = _unpack(data, KIND_SETTLED)
    if fields is None or len(data) != _HEADER.size:
        return None
    rank, handoff_id, attempt, num_completed, num_failed, begin, end, secret = fields
    if rank or begin or end:
        return None
    return SettledNotice(handoff_id, attempt, secret, num_completed, num_failed)


def _pack(
    kind: int, notice: Landed | SettledNotice, rank: int, first: int, second: int, layers: range
) -> bytes:
    assert len(notice.handoff_id) == ID_BYTES and len(notice.secret) == SECRET_BYTES
    return _HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        rank,
        notice.handoff_id,
        notice.attempt,
        first,
        second,
        layers.start,
        layers.stop,
        notice.secret,
    )


def _unpack(data: bytes, kind: int) -> tuple[int, bytes, int, int, int, int, int, bytes] | None:
    if len(data) < _HEADER.size:
        return None
    magic, version, its_kind, *fields = _HEADER.unpack_from(data)
    if (magic, version, its_kind) != (MAGIC, VERSION, kind):
        return None
    rank, handoff_id, attempt, first, second, begin, end, secret = fields
    return rank, handoff_id, attempt, first, second, begin, end, secret
