"""64-bit checksums of parts of KV blocks, over their raw bytes.

"xxh3" is for host memory, "mix64" for GPU memory; "none" proves nothing and costs nothing.
"""

import time
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tandem.runtime.errors import TransferError
from tandem.transfer.layout import ChecksumName
from tandem.transfer.transport import Event, Memory, Parts

if TYPE_CHECKING:
    from tandem.transfer.transport import Pool

_UNIT_BYTES: dict[ChecksumName, int] = {"none": 1, "xxh3": 1, "mix64": 4}


def checksum_name(memory: Memory, verify: bool = True) -> ChecksumName:
    """Return the function for pools in this memory; it is part of the layout of both sides."""
    if not verify:
        return "none"
    return "xxh3" if memory == "DRAM" else "mix64"


def part_checksums(
    pool: "Pool",
    block_ids: Sequence[int],
    parts: Parts,
    name: ChecksumName,
    after: Event | None = None,
) -> list[int]:
    """Return the result of `checksum_steps`, and wait for it."""
    steps = checksum_steps(pool, block_ids, parts, name, after)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            sums: list[int] = end.value
            return sums
        time.sleep(0)


def checksum_steps(
    pool: "Pool",
    block_ids: Sequence[int],
    parts: Parts,
    name: ChecksumName,
    after: Event | None = None,
) -> Generator[None, None, list[int]]:
    """Compute one unsigned 64-bit checksum per block id, over the bytes of `parts` in order.

    Yields while the event `after` has not happened and while a GPU computes; never waits for it.
    `pool` is contiguous, `[num_blocks, ...]`. "none" gives zeros. TransferError for a block that
    the pool doesn't have, and for a part that is not inside a block or, for mix64, not of whole
    words.
    """
    _check_parts(parts, pool.nbytes // len(pool), _UNIT_BYTES[name])
    num_blocks = len(pool)
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise TransferError(f"block {block_id} is not in a pool of {num_blocks} blocks")
    while after is not None and not after.query():
        yield
    if name == "none" or not block_ids:
        return [0] * len(block_ids)
    if name == "xxh3":
        return _xxh3(pool, block_ids, parts)
    # Imported here: a worker without a GPU may have no torch.
    from tandem.transfer.mix64 import mix64_steps

    assert not isinstance(pool, np.ndarray)
    sums = yield from mix64_steps(pool, block_ids, parts)
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in sums]


def host_bytes(pool: "Pool") -> memoryview:
    """Return the bytes of a contiguous pool in host memory; slices of them copy nothing."""
    if isinstance(pool, np.ndarray):
        return pool.data.cast("B")
    import torch

    return pool.view(-1).view(torch.uint8).numpy().data


def _xxh3(pool: "Pool", block_ids: Sequence[int], parts: Parts) -> list[int]:
    raw = host_bytes(pool)
    block_bytes = len(raw) // len(pool)
    starts = [block_id * block_bytes for block_id in block_ids]
    if len(parts) == 1:
        begin, end = parts[0][0], sum(parts[0])
        return [xxhash.xxh3_64_intdigest(raw[start + begin : start + end]) for start in starts]
    sums = []
    for start in starts:
        digest = xxhash.xxh3_64()
        for offset, length in parts:
            digest.update(raw[start + offset : start + offset + length])
        sums.append(digest.intdigest())
    return sums


@lru_cache(maxsize=256)
def _check_parts(parts: Parts, block_bytes: int, unit_bytes: int) -> None:
    """Raise TransferError for wrong parts. Cached: every handoff uses the same few parts."""
    if block_bytes % unit_bytes:
        raise TransferError(f"blocks of {block_bytes} bytes are not of {unit_bytes}-byte words")
    if not parts:
        raise TransferError("a checksum over no part of a block proves nothing")
    for offset, length in parts:
        if offset < 0 or length < 1 or offset + length > block_bytes:
            raise TransferError(
                f"the part of {length} bytes at {offset} is not inside a block of "
                f"{block_bytes} bytes"
            )
        if offset % unit_bytes or length % unit_bytes:
            raise TransferError(
                f"the part of {length} bytes at {offset} is not of {unit_bytes}-byte words"
            )
