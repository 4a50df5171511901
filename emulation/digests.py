"""Slots that prove their tokens, and draws that prove their slots.

A slot is a digest of its token, its position and the slot before it. A draw folds the last slots
and one full block of the context, which rotates with the position, then seed and position. So a
block that is not as it should be changes the answer soon. All modulo 2**64.
"""

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]
Ints = NDArray[np.int64]

# Odd, so that the chain of digests is a recurrence that a cumulative sum solves.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(MULTIPLIER), -1, 2**64))
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of SplitMix64
LAST_SLOTS = 8  # of a context: every draw reads them


def mix(digests: Digests) -> Digests:
    """Return digests with all bits mixed (SplitMix64's finalizer)."""
    digests = (digests ^ (digests >> np.uint64(30))) * _MIX_1
    digests = (digests ^ (digests >> np.uint64(27))) * _MIX_2
    return digests ^ (digests >> np.uint64(31))


def slot_inputs(tokens: Ints, positions: Ints) -> Digests:
    """Return what a slot adds to the one before it times MULTIPLIER."""
    return mix((tokens.astype(np.uint64) << np.uint64(32)) ^ positions.astype(np.uint64))


class Chain:
    """Slots of whole chunks: slot[i] = MULTIPLIER * slot[i - 1] + input[i]."""

    def __init__(self) -> None:
        self._up, self._down = np.ones(1, np.uint64), np.ones(1, np.uint64)

    def extend(self, before: Digests, tokens: Ints, start: int) -> Digests:
        """Return the slots of `tokens` from position `start` on; `before`, [1], is the slot before.

        It is zero at the start of a sequence.
        """
        num_tokens = len(tokens)
        if num_tokens >= len(self._up):
            self._up, self._down = (
                _powers(each, 2 * num_tokens) for each in (MULTIPLIER, _INVERSE)
            )
        inputs = slot_inputs(tokens, np.arange(start, start + num_tokens))
        sums = np.cumsum(inputs * self._down[1 : num_tokens + 1])
        return self._up[1 : num_tokens + 1] * (before + sums)


def _powers(base: np.uint64, count: int) -> Digests:
    factors = np.full(count, base)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def rotating_block(position: int, block_size: int) -> int:
    """Return the ordinal of the full block that the draw after `position` reads; -1: none.

    Each of n full blocks has its turn within fewer than 2 n draws: a turn is among the power of two
    above n, and does not begin anew when a block is added.
    """
    num_full = position // block_size
    if not num_full:
        return -1
    num_turns = 1 << (num_full - 1).bit_length()
    turn = position % num_turns
    return turn if turn < num_full else turn - num_turns // 2


def draw(
    last: Digests,  # [num_rows, LAST_SLOTS] newest first, zero before the first
    block: Digests,  # [num_rows, block_size] zero where there is none
    seeds: Digests,  # [num_rows]
    positions: Ints,  # [num_rows] of the newest slots
    token_ids: Ints,  # [num_choices] that a draw can give
) -> Ints:
    """Draw one token per row."""
    weights = _powers(_MIX_1, LAST_SLOTS + block.shape[1])
    fold = (last * weights[:LAST_SLOTS]).sum(1) + (mix(block) * weights[LAST_SLOTS:]).sum(1)
    drawn = mix(fold ^ mix(seeds) ^ positions.astype(np.uint64)) % np.uint64(len(token_ids))
    return token_ids[drawn.astype(np.int64)]
