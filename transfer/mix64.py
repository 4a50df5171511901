"""mix64, the checksum of blocks in GPU memory: the reference, and the launch of its kernel."""

from collections.abc import Generator, Sequence
from functools import lru_cache

import torch

from tandem.transfer.transport import Parts

# Odd 64-bit constants of splitmix64, as signed numbers because torch has no unsigned arithmetic.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER = 0xBF58476D1CE4E5B9 - (1 << 64)
_LOW_33_BITS = (1 << 33) - 1
_WORDS_PER_SLICE = 1 << 18  # temporaries of mix64 stay in a CPU's cache
_WORD_BYTES = 4


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


def mix64_steps(
    pool: torch.Tensor, block_ids: Sequence[int], parts: Parts
) -> Generator[None, None, list[int]]:
    """Compute the checksums of parts of blocks, signed. Yields while a GPU computes them.

    `pool` is contiguous, `[num_blocks, ...]`.
    """
    if pool.device.type != "cuda":
        on_cpu: list[int] = mix64(
            _words(pool), torch.tensor(list(block_ids), dtype=torch.int64), _word_parts(parts)
        ).tolist()
        return on_cpu
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
