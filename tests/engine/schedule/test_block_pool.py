from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.schedule.block_pool import BlockPool


def num_runs(block_ids: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(block_ids))


def taken(pool: BlockPool, num_blocks: int, after: int | None = None) -> list[int]:
    block_ids = pool.allocate(num_blocks, after)
    assert block_ids is not None
    return block_ids


def publish(pool: BlockPool, block_ids: list[int], hashes: list[bytes]) -> None:
    assert pool.publish(block_ids, hashes) == len(hashes)


def test_an_allocation_lies_in_one_run_while_there_is_one() -> None:
    pool = BlockPool(64, 16)
    tables = [taken(pool, n) for n in (5, 9, 3, 17)]
    assert [num_runs(table) for table in tables] == [1, 1, 1, 1]
    pool.free(tables[1])
    pool.free(tables[0])
    pool.free(tables[2])
    assert num_runs(taken(pool, 17)) == 1  # the three neighbours were joined
    pool.check_invariants()


def test_small_holes_are_filled_before_large_runs_are_cut() -> None:
    pool = BlockPool(64, 16)
    table = taken(pool, 32)
    pool.free(table[3:4])
    pool.free(table[10:12])
    assert taken(pool, 1) == table[3:4]
    assert taken(pool, 2) == table[10:12]


def test_an_allocation_continues_after_a_given_block_if_it_can() -> None:
    pool = BlockPool(64, 16)
    hole, first = taken(pool, 4), taken(pool, 4)
    pool.free(hole)  # which fits better
    assert taken(pool, 1, after=first[-1]) == [first[-1] + 1]
    assert taken(pool, 1, after=first[-1]) != [first[-1] + 1]  # somebody has it by now
    pool.check_invariants()


def test_a_prefix_is_found_shared_and_counted() -> None:
    pool = BlockPool(8, 16)
    table = taken(pool, 3)
    publish(pool, table, [b"a", b"b", b"c"])
    assert pool.count_prefix([b"a", b"b", b"x", b"c"]) == 2
    assert pool.match_prefix([b"a", b"b", b"x", b"c"]) == table[:2]
    pool.free(table)
    assert (pool.num_held, pool.num_cached, pool.num_free) == (2, 1, 5)
    pool.check_invariants({table[0]: 1, table[1]: 1})


def test_the_first_block_of_a_hash_stays_and_the_second_is_private() -> None:
    pool = BlockPool(8, 16)
    first, second = taken(pool, 2)
    assert pool.publish([first], [b"a"])
    assert not pool.publish([second], [b"a"])
    pool.free([second])
    assert pool.num_free == 7
    assert pool.match_prefix([b"a"]) == [first]


def test_the_least_recently_used_block_is_evicted_first_and_a_tail_before_its_prefix() -> None:
    removed: list[bytes] = []
    pool = BlockPool(6, 16)
    pool.on_removed = removed.extend
    old, new = taken(pool, 3), taken(pool, 3)
    publish(pool, old, [b"a0", b"a1", b"a2"])
    publish(pool, new, [b"b0", b"b1", b"b2"])
    pool.free(old)
    pool.free(new)
    pool.free(pool.match_prefix([b"a0"]))  # used again: now the most recent
    taken(pool, 2)
    assert removed == [b"a2", b"a1"]
    taken(pool, 3)
    assert removed == [b"a2", b"a1", b"b2", b"b1", b"b0"]
    assert pool.count_prefix([b"a0", b"a1"]) == 1


def test_nothing_is_shared_without_a_prefix_cache() -> None:
    pool = BlockPool(4, 16, enable_prefix_cache=False)
    table = taken(pool, 2)
    assert not pool.publish(table[:1], [b"a"])
    pool.free(table)
    assert pool.match_prefix([b"a"]) == []
    assert pool.num_free == 4


def test_quarantined_blocks_are_nobodys_until_they_are_released() -> None:
    pool = BlockPool(4, 16)
    table = taken(pool, 3)
    pool.quarantine(table)
    assert (pool.num_quarantined, pool.num_held, pool.num_available) == (3, 0, 1)
    assert pool.allocate(2) is None
    pool.check_invariants({})
    pool.release_quarantined(table)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="is not quarantined"):
        pool.release_quarantined(table)


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(4, 16)
    table = taken(pool, 1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed but not held"):
        pool.free(table)


def test_a_lost_block_violates_the_invariants() -> None:
    pool = BlockPool(4, 16)
    table = taken(pool, 2)
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_invariants({table[0]: 1})


class BlockPoolMachine(RuleBasedStateMachine):
    """A dozen blocks, any interleaving of what sequences and handoffs do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()
        self.pool = BlockPool(12, 4)
        self.pool.on_stored = self.known.update
        self.pool.on_removed = self.known.difference_update
        self.tables: list[list[int]] = []
        self.private: set[int] = set()  # held, unpublished
        self.quarantined: list[list[int]] = []

    @rule(num_blocks=st.integers(0, 13), continued=st.booleans())
    def allocate(self, num_blocks: int, continued: bool) -> None:
        num_available = self.pool.num_available
        table = self.tables[-1] if continued and self.tables else None
        block_ids = self.pool.allocate(num_blocks, after=table[-1] if table else None)
        assert (block_ids is None) == (num_blocks > num_available)
        if block_ids:
            assert len(set(block_ids)) == num_blocks
            assert not set(block_ids) & {i for table in self.tables for i in table}
            assert not set(block_ids) & {i for table in self.quarantined for i in table}
            self.private.update(block_ids)
            self.tables.append(block_ids)

    @precondition(lambda self: self.private)
    @rule(data=st.data(), name=st.integers(0, 9))
    def publish(self, data: st.DataObject, name: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.private)))
        is_new = bytes([name]) not in self.known
        assert self.pool.publish([block_id], [bytes([name])]) == is_new
        if is_new:
            self.private.discard(block_id)

    @rule(names=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def match(self, names: list[int]) -> None:
        hashes = [bytes([name]) for name in names]
        num_expected = self.pool.count_prefix(hashes)
        block_ids = self.pool.match_prefix(hashes)
        assert len(block_ids) == num_expected
        assert all(block_hash in self.known for block_hash in hashes[:num_expected])
        if block_ids:
            self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.private.difference_update(table)
        self.pool.free(table)

    @precondition(lambda self: self.private)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        block_ids = [i for i in table if i in self.private]
        table[:] = [i for i in table if i not in self.private]
        self.private.difference_update(block_ids)
        self.pool.quarantine(block_ids)
        self.quarantined.append(block_ids)
        self.tables = [table for table in self.tables if table]

    @rule()
    def clear(self) -> None:
        num_free, num_held = self.pool.num_free, self.pool.num_held
        num_freed = self.pool.clear_cache()
        assert (self.pool.num_free, self.pool.num_held) == (num_free + num_freed, num_held)
        assert self.pool.num_cached == 0

    @precondition(lambda self: self.quarantined)
    @rule()
    def release(self) -> None:
        self.pool.release_quarantined(self.quarantined.pop())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        holders: dict[int, int] = {}
        for table in self.tables:
            for block_id in table:
                holders[block_id] = holders.get(block_id, 0) + 1
        self.pool.check_invariants(holders)
        assert self.pool.num_held == len(holders)
        assert set(self.pool._blocks_of[0]) == self.known
        num_all = self.pool.num_free + self.pool.num_cached + self.pool.num_held
        assert num_all + self.pool.num_quarantined == self.pool.num_blocks


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_every_block_is_accounted_for_whatever_happens = BlockPoolMachine.TestCase
