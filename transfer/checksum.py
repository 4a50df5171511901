"""64-bit checksums of KV blocks, over their raw bytes."""

from collections.abc import Sequence

import torch
import xxhash

from tandem.transfer.layout import ChecksumName
from tandem.transfer.transport import Memory

# Odd 64-bit constants of splitmix64, as signed numbers because torch has no unsigned arithmetic.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER = 0xBF58476D1CE4E5B9 - (1 << 64)
_LOW_33_BITS = (1 << 33) - 1
_WORDS_PER_SLICE = 1 << 24  # bounds mix64's temporaries to a few hundred MiB


def checksum_name(memory: Memory) -> ChecksumName:
    """The function for pools in this memory; part of the layout, so both sides agree on it."""
    return "xxh3" if memory == "DRAM" else "mix64"


def block_checksums(pool: torch.Tensor, block_ids: Sequence[int]) -> list[int]:
    """One unsigned 64-bit checksum per block id. `pool` is contiguous, `[num_blocks, ...]`."""
    if not block_ids:
        return []
    if pool.device.type == "cpu":
        return _xxh3(pool, block_ids)
    return mix64(pool, block_ids)


def mix64(pool: torch.Tensor, block_ids: Sequence[int]) -> list[int]:
    """The sum over a block's 32-bit words, each mixed with its position; on any device."""
    words = pool.view(pool.shape[0], -1).view(torch.int32)  # [num_blocks, words per block]
    num_words = words.shape[1]
    positions = torch.arange(1, num_words + 1, device=pool.device) * _STEP
    index = torch.tensor(block_ids, device=pool.device)
    sums = []
    for part in torch.split(index, max(1, _WORDS_PER_SLICE // num_words)):
        mixed = words[part].to(torch.int64) + positions
        mixed = (mixed ^ ((mixed >> 31) & _LOW_33_BITS)) * _MULTIPLIER
        mixed = mixed ^ ((mixed >> 31) & _LOW_33_BITS)
        sums.append(mixed.sum(dim=1))
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in torch.cat(sums).tolist()]


def _xxh3(pool: torch.Tensor, block_ids: Sequence[int]) -> list[int]:
    rows = pool.view(pool.shape[0], -1).view(torch.uint8).numpy()  # a view: nothing is copied
    return [xxhash.xxh3_64_intdigest(rows[block_id]) for block_id in block_ids]
