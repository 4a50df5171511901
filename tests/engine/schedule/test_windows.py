"""Groups of layers with a window: which blocks a sequence takes, keeps, and finds again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.block_tables import extend_table, free_passed, held_blocks
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.schedule.sequence_blocks import free_blocks, take_blocks
from tandem.engine.schedule.windows import (
    NO_BLOCK,
    first_read,
    num_blocks_needed,
    num_tokens_within,
)
from tests.engine.conftest import make_harness, make_seq

WINDOWS = (0, 6)  # tokens, in blocks of 4


def publish_all(pool: BlockPool, table: list[int], hashes: list[bytes]) -> None:
    for group in range(pool.num_groups):
        block_ids = table[group :: pool.num_groups]
        pool.publish(block_ids, hashes[: len(block_ids)], group)


def grown(pool: BlockPool, num_ordinals: int, position: int) -> list[int]:
    table: list[int] = []
    assert extend_table(pool, table, num_ordinals, position)
    return table


@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 9))
def test_the_first_block_read_is_that_of_the_first_position_in_sight(
    window: int, position: int, block_size: int
) -> None:
    seen = range(max(0, position - window + 1), position + 1)
    assert first_read(window, position, block_size) == seen[0] // block_size
    assert first_read(0, position, block_size) == 0


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 80), st.integers(1, 5))
def test_the_longest_sequence_that_fits_is_the_longest(
    windows: list[int], num_blocks: int, block_size: int
) -> None:
    longest, most = num_tokens_within(windows, num_blocks, 60, block_size), 60 + -60 % block_size
    assert longest <= most and num_blocks_needed(windows, longest, block_size) <= num_blocks
    assert longest == most or num_blocks_needed(windows, longest + 1, block_size) > num_blocks


def test_a_table_has_holes_where_no_query_reads() -> None:
    pool = BlockPool(16, 4, windows=WINDOWS)
    assert grown(pool, 4, 15) == [0, NO_BLOCK, 1, NO_BLOCK, 2, 4, 3, 5]
    assert pool.num_free == 10


def test_a_prefix_is_found_while_the_blocks_of_its_last_window_are_cached() -> None:
    pool = BlockPool(16, 4, windows=WINDOWS)
    hashes = [bytes([i]) for i in range(5)]
    table = grown(pool, 5, 0)
    publish_all(pool, table, hashes)
    pool.free(table)
    assert pool.count_prefix(hashes) == 5
    found = pool.match_prefix(hashes[:3])
    assert found == [table[0], NO_BLOCK, table[2], table[3], table[4], table[5]]
    pool.check_invariants(dict.fromkeys(held_blocks(found), 1))
    pool.free(held_blocks(found))


def test_of_a_prefix_no_window_is_asked_for_but_the_last() -> None:
    pool = BlockPool(16, 4, windows=WINDOWS)
    hashes = [bytes([i]) for i in range(5)]
    table = grown(pool, 5, 0)
    pool.publish(table[::2], hashes, 0)
    pool.publish(table[7::2], hashes[3:], 1)
    assert pool.count_prefix(hashes) == 5  # position 20 reads from 15 on, in block 3
    assert pool.count_prefix(hashes[:4]) == 0


def test_a_prefix_whose_window_was_evicted_is_found_as_far_as_another_one_is_whole() -> None:
    pool = BlockPool(10, 4, windows=WINDOWS)
    hashes = [bytes([i]) for i in range(5)]
    table = grown(pool, 5, 0)
    publish_all(pool, table, hashes)
    pool.free([table[7]])  # of the window, in ordinal block 3: the next to be evicted
    pool.free(table[:7] + table[8:])
    assert pool.allocate(1) == [table[7]]
    # Tokens after block 4 read from block 3 on, those after block 3 from block 1 on.
    assert pool.count_prefix(hashes) == 3
    pool.clear_cache()
    assert pool.count_prefix(hashes) == 0


def test_only_the_first_group_is_told_of() -> None:
    known: list[bytes] = []
    pool = BlockPool(4, 4, windows=WINDOWS)
    pool.on_stored, pool.on_removed = known.extend, lambda gone: [known.remove(h) for h in gone]
    table = grown(pool, 1, 0)
    publish_all(pool, table, [b"a"])
    assert known == [b"a"]
    pool.free(table)
    pool.clear_cache()
    assert known == []


@pytest.mark.parametrize("windows", [WINDOWS, (0, 6, 14)])
def test_a_sequence_keeps_of_its_windows_what_later_tokens_read(windows: tuple[int, ...]) -> None:
    harness = make_harness(64, windows=windows, max_num_batched_tokens=8)
    seq = make_seq("a", list(range(40)), max_tokens=30)
    harness.engine.add(seq)
    while len(harness.texts.get("a", [])) < 29:
        harness.step()
        num_chunk_blocks = 2 if "a" not in harness.texts else 0
        for group, window in enumerate(windows):
            num_held = len(held_blocks(seq.block_table[group :: len(windows)]))
            # of a window that lies anywhere, one begun, and those of a chunk
            assert num_held <= window // 4 + 2 + num_chunk_blocks or not window
            assert num_held == len(seq.block_table) // len(windows) or window


def test_nothing_is_known_of_blocks_that_were_given_back() -> None:
    pool = BlockPool(64, 4, windows=WINDOWS)
    seq, new = (make_seq("a", list(range(40)), max_tokens=8) for _ in range(2))
    assert take_blocks(pool, seq, 0, is_remote=True)
    seq.num_computed_tokens = seq.num_launched_tokens = 40
    seq.num_published_blocks, seq.num_reserved_cached_blocks = 10, 2
    free_passed(pool, seq)
    assert seq.num_passed_blocks > 0
    free_blocks(pool, seq)
    pool.check_invariants({})
    for name in Sequence.__slots__:
        if name.startswith("num_"):
            assert getattr(seq, name) == getattr(new, name), name


def test_chunks_leave_blocks_for_other_sequences_to_grow_into() -> None:
    harness = make_harness(26, windows=WINDOWS, max_num_batched_tokens=64, prefill_chunk_tokens=64)
    scheduler = harness.engine.scheduler
    scheduler.num_watermark_blocks = 4
    harness.engine.add(make_seq("a", list(range(8)), max_tokens=30))
    harness.step()
    harness.engine.add(make_seq("b", list(range(100, 140)), max_tokens=8))
    harness.step()
    # Of 20 blocks it takes 16, in two groups.
    assert scheduler.running["b"].num_launched_tokens == 8 * 4


def test_a_prompt_longer_than_the_pool_could_hold_without_windows_runs() -> None:
    """Its 12 blocks need 24 in all without windows; chunks are cut to what there is."""
    harness = make_harness(
        num_blocks_needed(WINDOWS, 48, 4), windows=WINDOWS, max_num_batched_tokens=64
    )
    seq = make_seq("a", list(range(40)), max_tokens=8)
    harness.engine.add(seq)
    harness.run()
    assert harness.finished["a"].error is None and len(harness.texts["a"]) == 8
    harness.assert_all_free()


@pytest.mark.parametrize("num_shared", [16, 19])
def test_a_shared_head_is_computed_once_though_its_window_has_passed(num_shared: int) -> None:
    harness = make_harness(64, windows=WINDOWS)
    head = list(range(num_shared))
    for name, tail in (("a", [100] * 20), ("b", [200] * 20)):
        harness.engine.add(make_seq(name, head + tail, max_tokens=4))
        harness.run()
    assert harness.finished["b"].num_cached_tokens == 16


def test_a_reservation_asks_for_what_the_answer_will_read() -> None:
    harness = make_harness(64, windows=WINDOWS)
    seq = make_seq("a", list(range(30)), max_tokens=8)
    reservation = harness.engine.reserve(seq)
    assert reservation is not None
    ordinals = [ordinal for ordinal, _ in reservation.fill]
    # 8 blocks of the first group; position 29 reads from 24 on in the second.
    assert ordinals == [*range(0, 16, 2), 13, 15]
    harness.engine.check_invariants()
    harness.engine.abort("a")
    harness.assert_all_free()


def test_other_workers_are_told_of_blocks_over_all_groups() -> None:
    """Routers count a prompt's blocks without knowing of groups."""
    harness = make_harness(64, windows=WINDOWS)
    harness.engine.reserve(make_seq("a", list(range(30)), max_tokens=8))
    load = harness.engine.load()
    assert (load.num_blocks, load.num_free_blocks) == (64, 54)
    report = load.report("w", "1", "both")
    assert (report.num_blocks, report.num_free_blocks) == (32, 27)
