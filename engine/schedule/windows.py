"""The blocks that layers with a sliding window read, and the need of a sequence. Pure.

A window is the number of positions that a query sees, its own the last; 0: all of them. A sequence
has a block in each group of layers for every `block_size` tokens, as far as a query reads them.
"""

from bisect import bisect_right
from collections.abc import Sequence

from tandem.runtime.wire.block_hash import num_blocks_of

NO_BLOCK = -1  # in a block table, where no query reads


def first_read(window: int, position: int, block_size: int) -> int:
    """Return the first ordinal block that queries from `position` on read."""
    return max(0, position + 1 - window) // block_size if window else 0


def num_blocks_needed(windows: Sequence[int], num_tokens: int, block_size: int) -> int:
    """Return the blocks with which a sequence of `num_tokens` can be computed, in all groups.

    Of a group with a window these are two windows: the one that a query reads, and as much for a
    chunk of a prompt. Longer chunks take more while there are more.
    """
    whole = num_blocks_of(num_tokens, block_size)
    return sum(_of_group(window, whole, block_size) for window in windows)


def num_tokens_within(
    windows: Sequence[int], num_blocks: int, longest: int, block_size: int
) -> int:
    """Return the most tokens, up to `longest` in whole blocks, that need at most `num_blocks`."""
    lengths = range(num_blocks_of(longest, block_size) + 1)

    def needed(whole: int) -> int:
        return sum(_of_group(window, whole, block_size) for window in windows)

    return (bisect_right(lengths, num_blocks, key=needed) - 1) * block_size


def _of_group(window: int, whole: int, block_size: int) -> int:
    return min(whole, 2 * num_blocks_of(window, block_size) + 1) if window else whole
