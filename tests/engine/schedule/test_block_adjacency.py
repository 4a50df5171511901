"""Blocks of one sequence lie side by side, so that a handoff of them is few descriptors."""

import random
from dataclasses import dataclass, field
from itertools import count, pairwise
from statistics import median, quantiles

import pytest

from tandem.engine.schedule.block_pool import BlockPool

NUM_BLOCKS = 4096
PROMPT_BLOCKS = 512  # 8k tokens in blocks of 16


def num_runs(block_ids: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(block_ids))


def num_descriptors(source: list[int], target: list[int]) -> int:
    """Pairs of blocks that adjoin the pair before on both sides need none of their own."""
    pairs = list(zip(source, target, strict=True))
    return 1 + sum(b != (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))


@dataclass
class Churn:
    """A full pool: sequences come and go, some grow, and what they leave is cached and evicted.

    Of the pool 60 to 90 % is held, by sequences of 4 to 512 blocks, most of them short.
    """

    seed: int
    growth: float  # blocks that each running sequence takes between two arrivals
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, 16))
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._hashes = (n.to_bytes(8, "little") for n in count())
        self._held = 0.75

    def allocate(self, num_blocks: int) -> list[int]:
        """Published blocks, room for which is made by ending sequences at random."""
        pool = self.pool
        limit = self._held * NUM_BLOCKS
        while self.tables and (
            pool.num_held + num_blocks > limit or pool.num_available < num_blocks
        ):
            pool.free(self.tables.pop(self.random.randrange(len(self.tables))))
        block_ids = pool.allocate(num_blocks)
        assert block_ids is not None
        pool.publish(block_ids, [next(self._hashes) for _ in block_ids])
        return block_ids

    def step(self) -> None:
        if self.random.random() < 0.05:
            self._held = self.random.uniform(0.6, 0.9)
        for table in self.tables:
            if self.random.random() < self.growth and self.pool.num_available:
                grown = self.pool.allocate(1, after=table[-1])
                assert grown is not None
                self.pool.publish(grown, [next(self._hashes)])
                table += grown
        self.tables.append(self.allocate(int(2 ** self.random.uniform(2, 9))))

    def prompts(self, num_steps: int) -> list[list[int]]:
        """An 8k prompt now and then, once the pool has been full for a while."""
        tables = []
        for i in range(num_steps):
            self.step()
            if i > num_steps // 3 and i % 4 == 0:
                tables.append(self.allocate(PROMPT_BLOCKS))
                self.pool.free(tables[-1])
        self.pool.check_invariants()
        assert self.pool.num_cached > 0
        return tables


@pytest.mark.parametrize("growth", [0.0, 0.1])
def test_a_long_prompt_lies_in_few_runs_of_a_pool_in_use(growth: float) -> None:
    runs = [num_runs(table) for table in Churn(1, growth).prompts(600)]
    assert median(runs) <= 32
    assert quantiles(runs, n=10)[-1] <= 64


def test_a_long_prompt_goes_from_a_pool_in_use_to_another_in_few_descriptors() -> None:
    prefill, decode = Churn(2, growth=0.0), Churn(3, growth=0.1)
    descriptors = [
        num_descriptors(source, target)
        for source, target in zip(prefill.prompts(400), decode.prompts(400), strict=True)
    ]
    assert max(descriptors) <= 128


def test_a_long_prompt_is_one_descriptor_between_fresh_pools() -> None:
    source = BlockPool(NUM_BLOCKS, 16).allocate(PROMPT_BLOCKS)
    target = BlockPool(NUM_BLOCKS, 16).allocate(PROMPT_BLOCKS)
    assert source is not None and target is not None
    assert num_descriptors(source, target) == 1


def test_an_eviction_frees_a_little_ahead_and_never_what_is_not_there() -> None:
    removed: list[bytes] = []
    pool = BlockPool(128, 16)
    pool.on_removed = removed.extend
    for i in range(128):
        (block_id,) = pool.allocate(1) or []
        assert pool.publish([block_id], [bytes([i])])
        pool.free([block_id])
    pool.allocate(1)
    assert removed == [bytes([i]) for i in range(3)]  # one, and a 64th of the pool
    pool.allocate(2)
    assert len(removed) == 3
    assert pool.allocate(126) is None
    assert pool.allocate(125) is not None
    assert len(removed) == 128
    pool.check_invariants()
