"""KV pools for schedules: one word per layer, plane (keys, values) and head of a block.

A word says what it is (which prompt, ordinal, layer, plane, head) and who computed it, so a block
that holds anything else than it should is told from a good one. They are lists, quick enough for
millions of schedules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

from tandem.transfer.layout import KvLayout, RankPair

RUN_BITS = 20  # of a word: who computed it, counted through a schedule; 0 is the decode worker
CHECKSUM_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranks of both workers, the KV heads that they share, and the layers.

    Blocks are of `num_kinds`, in turns, each of so many other layers of the model.
    """

    prefill_tp: int
    decode_tp: int
    num_heads: int
    num_layers: int
    num_kinds: int = 1

    def heads(self, tp_size: int, rank: int) -> range:
        """The heads that one of `tp_size` ranks has, which others may have too."""
        first = rank * self.num_heads // tp_size
        return range(first, first + max(1, self.num_heads // tp_size))


@cache
def layout_of(shape: Shape) -> KvLayout:
    """The layout of the decode worker."""
    return KvLayout(shape.num_layers, shape.num_heads, 1, 1, "float32", tp_size=shape.decode_tp)


@cache
def rank_pairs_of(shape: Shape) -> tuple[RankPair, ...]:
    return layout_of(shape).rank_pairs_from(shape.prefill_tp)


@cache
def content(shape: Shape, tp_size: int, rank: int, prompt: int, ordinal: int) -> list[int]:
    """The words of one block of one rank, as nobody in particular computes them."""
    words = []
    for layer in range(shape.num_layers):
        for plane in range(2):
            for head in shape.heads(tp_size, rank):
                name = (((prompt * 16 + ordinal) * 8 + layer) * 2 + plane) * 8 + head + 1
                words.append(name << RUN_BITS)
    return words


@cache
def positions(num_heads: int, heads: range, layers: range) -> tuple[int, ...]:
    """Where in a block of `num_heads` heads the words of these heads and layers are."""
    return tuple(
        plane * num_heads + head
        for plane in range(2 * layers.start, 2 * layers.stop)
        for head in heads
    )


@cache
def _getter(num_heads: int, heads: range, layers: range) -> Callable[[list[int]], object]:
    return itemgetter(*positions(num_heads, heads, layers))


class Words:
    """The pools of one worker's ranks: lists of words per block, None while nobody wrote it."""

    def __init__(self, shape: Shape, tp_size: int, num_blocks: int) -> None:
        self.shape = shape
        self.tp_size = tp_size
        self.num_heads = len(shape.heads(tp_size, 0))
        self.num_words = 2 * shape.num_layers * self.num_heads  # of a block
        self.ranks: list[list[list[int] | None]] = [[None] * num_blocks for _ in range(tp_size)]

    def block(self, rank: int, block_id: int) -> list[int]:
        words = self.ranks[rank][block_id]
        if words is None:
            words = self.ranks[rank][block_id] = [0] * self.num_words
        return words

    def compute(self, block_id: int, layers: range, prompt: int, ordinal: int, run: int) -> None:
        """Write what these layers of this block of the prompt hold."""
        begin, end = (2 * self.num_heads * layer for layer in (layers.start, layers.stop))
        for rank in range(self.tp_size):
            words = content(self.shape, self.tp_size, rank, prompt, ordinal)[begin:end]
            self.put(rank, block_id, begin, [word | run for word in words])

    def put(self, rank: int, block_id: int, begin: int, words: list[int]) -> None:
        self.block(rank, block_id)[begin : begin + len(words)] = words

    def holds(self, block_id: int, prompt: int, ordinal: int, runs: Sequence[int]) -> bool:
        """Every rank of the block is what one of `runs` computed for this place of the prompt."""
        for rank in range(self.tp_size):
            found = self.block(rank, block_id)
            words = content(self.shape, self.tp_size, rank, prompt, ordinal)
            if not any(found == [word | run for word in words] for run in runs):
                return False
        return True

    def is_of(self, block_id: int, prompt: int, ordinal: int) -> bool:
        """Every rank of the block is this place of the prompt, whoever computed it."""
        for rank in range(self.tp_size):
            found = [word >> RUN_BITS << RUN_BITS for word in self.block(rank, block_id)]
            if found != content(self.shape, self.tp_size, rank, prompt, ordinal):
                return False
        return True

    def checksums(
        self, rank: int, heads: range, layers: range, block_ids: Sequence[int]
    ) -> list[int]:
        words_of = _getter(self.num_heads, heads, layers)
        return [hash(words_of(self.block(rank, b))) & CHECKSUM_MASK for b in block_ids]


@dataclass(slots=True)
class Flight:
    """A posted write."""

    near: Words
    far: Words
    ranks: RankPair
    layers: range
    pairs: list[tuple[int, int]]  # (local, remote) block ids

    def copy(self, num_blocks: int, torn: bool) -> None:
        """Land in the first `num_blocks` of its blocks; `torn`: the first half of each only."""
        ranks, near, far = self.ranks, self.near, self.far
        origins = positions(near.num_heads, ranks.prefill_heads, self.layers)
        targets = positions(far.num_heads, ranks.decode_heads, self.layers)
        if torn:
            origins = origins[: len(origins) // 2]
        for local, remote in self.pairs[:num_blocks]:
            source = near.block(ranks.prefill_rank, local)
            target = far.block(ranks.decode_rank, remote)
            for origin, where in zip(origins, targets, strict=False):
                target[where] = source[origin]
