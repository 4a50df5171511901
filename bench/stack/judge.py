"""The judge of answers of emulated workers, whose tokens prove the KV that they were drawn from."""

from collections.abc import Sequence

import numpy as np

from tandem.emulation.digests import LAST_SLOTS, Chain, Ints, draw, rotating_block


def true_answer(
    tokens: Sequence[int], num_prompt: int, seed: int, token_ids: Ints, block_size: int
) -> list[int]:
    """Return for each token of an answer the one that should follow all that is before it.

    `tokens` is prompt and answer. An answer is right when it equals what this returns.
    """
    of_all = np.array(tokens, np.int64)
    slots = Chain().extend(np.zeros(1, np.uint64), of_all, 0)
    at = np.arange(num_prompt - 1, len(tokens) - 1)
    back = at[:, None] - np.arange(LAST_SLOTS)
    last = np.where(back >= 0, slots[back], np.uint64(0))
    turns = np.array([rotating_block(each, block_size) for each in at.tolist()], np.int64)
    num_full = len(slots) // block_size
    blocks = np.zeros((num_full + 1, block_size), np.uint64)  # the last one: none
    blocks[:num_full] = slots[: num_full * block_size].reshape(num_full, block_size)
    seeds = np.full(len(at), seed % 2**64, np.uint64)
    answer: list[int] = draw(last, blocks[turns], seeds, at, token_ids).tolist()
    return answer
