"""Which sequences of a decode step share the blocks at the head of their tables, on the device.

Levels are forks of a tree: at the first, sequences with the same first block share what all of them
have in common, and at the next those that go on together share what follows. A level is cut where
a tile of attention ends.
"""

from dataclasses import dataclass

import torch

LEVELS = 2


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The groups of each level; groups of more than so many sequences are several."""

    # [LEVELS, num_seqs] (place |-> sequence): those of a group stand side by side
    seqs: torch.Tensor
    # [LEVELS, num_seqs] (place |-> sequences of the group that begins there); 0: none does
    counts: torch.Tensor
    # [LEVELS, num_seqs] (sequence |-> position where what it shares ends); grows with the level
    ends: torch.Tensor


def share_prefixes(
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    context_lens: torch.Tensor,  # [num_seqs]
    block_size: int,
    tile_tokens: int,
    most_seqs: int,  # of a group
) -> SharedPrefixes:
    """Return the prefixes of a decode step that are read once for several sequences.

    A block counts if all of its positions come before a query's own. The operations are those that
    a graph can hold. Entries past a context may be anything.
    """
    max_blocks = block_tables.shape[1]
    ordinals = torch.arange(max_blocks, device=block_tables.device)
    num_whole = (context_lens - 1).clamp(min=0).div(block_size, rounding_mode="floor")
    leaders = num_common = end = torch.zeros_like(num_whole)
    levels = []
    for _ in range(LEVELS):
        fork = num_common.clamp(max=max_blocks - 1).unsqueeze(1)
        blocks = block_tables.gather(1, fork).squeeze(1)
        is_open = num_common < num_whole
        together = _equal(blocks) & _equal(leaders) & is_open & is_open.unsqueeze(1)
        together.fill_diagonal_(True)
        leaders = together.byte().argmax(1)  # the first of each group
        sizes = together.sum(1)
        is_common = block_tables == block_tables.index_select(0, leaders)
        is_common &= ordinals < num_whole.unsqueeze(1)
        num_leading = is_common.cumprod(1).sum(1)
        num_common = num_leading.expand_as(together).masked_fill(~together, max_blocks).amin(1)
        shared = num_common * block_size
        shared = (shared - shared % tile_tokens) * (sizes > 1)
        begin, end = end, torch.maximum(end, shared)
        ranks = together.tril(-1).sum(1)
        counts = (sizes - ranks).clamp(max=most_seqs) * ((ranks % most_seqs == 0) & (end > begin))
        places = leaders.argsort(stable=True)
        levels.append((places, counts.index_select(0, places), end))
    return SharedPrefixes(*(torch.stack(of_levels) for of_levels in zip(*levels, strict=True)))


def _equal(values: torch.Tensor) -> torch.Tensor:
    """Return [n, n]: which of the n values are equal."""
    return values == values.unsqueeze(1)
