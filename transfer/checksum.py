"""64-bit checksums of parts of KV blocks, over their raw bytes.

"xxh3" is for host memory, "mix64" for GPU memory; "none" proves nothing and costs nothing.
"""

import math
import time
from collections.abc import Generator, Sequence
from functools import lru_cache

import torch
import xxhash

from tandem.runtime.errors import TransferError
from tandem.transfer.layout import ChecksumName
from tandem.transfer.transport import Memory, Parts

# Odd 64-bit constants of splitmix64, as signed numbers because torch has no unsigned arithmetic.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER = 0xBF58476D1CE4E5B9 - (1 << 64)
_LOW_33_BITS = (1 << 33) - 1
_WORDS_PER_SLICE = 1 << 18  # temporaries of mix64 stay in a CPU's cache
_WORD_BYTES = 4
_UNIT_BYTES: dict[ChecksumName, int] = {"none": 1, "xxh3": 1, "mix64": _WORD_BYTES}


def checksum_name(memory: Memory, verify: bool = True) -> ChecksumName:
    """Return the function for pools in this memory; it is part of the layout of both sides."""
    if not verify:
        return "none"
    return "xxh3" if memory == "DRAM" else "mix64"


def part_checksums(
    pool: torch.Tensor,
    block_ids: Sequence[int],
    parts: Parts,
    name: ChecksumName,
    after: torch.cuda.Event | None = None,
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
    pool: torch.Tensor,
    block_ids: Sequence[int],
    parts: Parts,
    name: ChecksumName,
    after: torch.cuda.Event | None = None,
) -> Generator[None, None, list[int]]:
    """Compute one unsigned 64-bit checksum per block id, over the bytes of `parts` in order.

    Yields while the event `after` has not happened and while a GPU computes; never waits for it.
    `pool` is contiguous, `[num_blocks, ...]`. "none" gives zeros. TransferError for a block that
    the pool doesn't have, and for a part that is not inside a block or, for mix64, not of whole
    words.
    """
    assert pool.is_contiguous()
    _check_parts(parts, math.prod(pool.shape[1:]) * pool.element_size(), _UNIT_BYTES[name])
    num_blocks = len(pool)
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise TransferError(f"block {block_id} is not in a pool of {num_blocks} blocks")
    while after is not None and not after.query():  # type: ignore[no-untyped-call]
        yield
    if name == "none" or not block_ids:
        return [0] * len(block_ids)
    if name == "xxh3":
        return _xxh3(pool, block_ids, parts)
    if pool.device.type == "cuda":
        sums = yield from _mix64_on_gpu(pool, block_ids, parts)
    else:
        ids = torch.tensor(list(block_ids), dtype=torch.int64)
        sums = mix64(_words(pool), ids, _word_parts(parts)).tolist()
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in sums]


def mix64(words: torch.Tensor, block_ids: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The reference implementation of `tandem.kernels.checksum.block_checksums`, on any device.

    `words` is int32 `[num_blocks, words_per_block]`, `parts` are (first word, number of words).
    Int64 `[num_ids]`, signed.
    """
    sums = torch.zeros(len(block_ids), dtype=torch.int64, device=words.device)
    position = 1
    for first, count in parts:
        steps = torch.arange(position, position + count, device=words.device) * _STEP
        num_ids = max(1, _WORDS_PER_SLICE // count)
        slices = zip(torch.split(block_ids, num_ids), torch.split(sums, num_ids), strict=True)
        for ids, total in slices:
            mixed = words[:, first : first + count][ids].to(torch.int64) + steps
            mixed = (mixed ^ ((mixed >> 31) & _LOW_33_BITS)) * _MULTIPLIER
            total += (mixed ^ ((mixed >> 31) & _LOW_33_BITS)).sum(dim=1)
        position += count
    return sums


def _mix64_on_gpu(
    pool: torch.Tensor, block_ids: Sequence[int], parts: Parts
) -> Generator[None, None, list[int]]:
    # Imported here: a decode worker's machine may have no GPU, and then no Triton either.
    from tandem.kernels.checksum import block_checksums as launch

    stream = _stream(pool.device)
    with torch.cuda.stream(stream):
        table = _device_parts(pool.device, parts)
        ids = torch.tensor(list(block_ids), dtype=torch.int64, pin_memory=True)
        sums = launch(_words(pool), ids.to(pool.device, non_blocking=True), table)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
    while not done.query():  # type: ignore[no-untyped-call]
        yield
    values: list[int] = on_host.tolist()
    return values


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream with priority over the model's: a sequence waits for its checksums."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=256)
def _device_parts(device: torch.device, parts: Parts) -> torch.Tensor:
    from tandem.kernels.checksum import part_table

    return part_table(_word_parts(parts), device)


def _word_parts(parts: Parts) -> Parts:
    return tuple((offset // _WORD_BYTES, length // _WORD_BYTES) for offset, length in parts)


def _words(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(len(pool), -1).view(torch.int32)  # [num_blocks, words_per_block]


def _xxh3(pool: torch.Tensor, block_ids: Sequence[int], parts: Parts) -> list[int]:
    assert pool.device.type == "cpu"
    raw = pool.view(-1).view(torch.uint8).numpy().data  # slices of a memoryview copy nothing
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
