"""Block tables grow by what is left over, and side by side."""

import pytest

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.block_tables import cover_chunk, extend_table, free_passed
from tandem.engine.schedule.sequence_blocks import num_missing
from tandem.engine.schedule.windows import NO_BLOCK
from tests.engine.conftest import make_seq


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
@pytest.mark.parametrize(("num_spare", "has_grown"), [(0, True), (2, True), (3, False)])
def test_a_table_grows_where_enough_blocks_are_left_over(
    windows: tuple[int, ...], num_spare: int, has_grown: bool
) -> None:
    pool = BlockPool(8, 4, windows=windows)
    table: list[int] = []
    num_ordinals = 6 // len(windows)
    assert extend_table(pool, table, num_ordinals, 0, num_spare) is has_grown
    assert (len(table), pool.num_available) == ((6, 2) if has_grown else (0, 8))
    if has_grown:
        assert not extend_table(pool, table, num_ordinals + 3, 0)
        assert (len(table), pool.num_available) == (6, 2)


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_a_table_grows_behind_its_last_block(windows: tuple[int, ...]) -> None:
    pool = BlockPool(64, 4, windows=windows)
    table, hole = list[int](), pool.allocate(1 + len(windows))
    assert hole is not None and extend_table(pool, table, 2, 0)
    pool.free(hole[:-1])  # which fits better
    assert extend_table(pool, table, 3, 0)
    assert max(table) - min(table) == len(table) - 1


def test_a_chunk_is_cut_to_the_blocks_that_may_be_taken() -> None:
    pool = BlockPool(8, 4)
    seq = make_seq("r", list(range(40)))
    assert cover_chunk(pool, seq, 10, 0) == 10
    assert len(seq.block_table) == 3
    assert cover_chunk(pool, seq, 12, 0) == 12 and len(seq.block_table) == 3
    assert cover_chunk(pool, seq, 40, 2) == 24
    assert (len(seq.block_table), pool.num_available) == (6, 2)
    assert cover_chunk(pool, seq, 40, 2) == 24


def test_a_long_chunk_holds_more_blocks_than_its_sequence_needs_and_misses_none() -> None:
    pool = BlockPool(32, 4, windows=(0, 10))
    seq = make_seq("r", list(range(40)))
    assert num_missing(pool, seq, []) == 10 + 7  # of the window two times three, and one begun
    assert cover_chunk(pool, seq, 40, 0) == 40
    assert len(seq.block_table) == 20 and num_missing(pool, seq, seq.block_table) == 0


@pytest.mark.parametrize(("num_computed", "num_passed"), [(17, 2), (18, 3)])
def test_blocks_that_every_window_has_passed_are_free_again(
    num_computed: int, num_passed: int
) -> None:
    pool = BlockPool(16, 4, windows=(0, 6))
    seq = make_seq("r", list(range(24)), num_layer_groups=2)
    assert cover_chunk(pool, seq, 24, 0) == 24
    seq.num_computed_tokens = num_computed
    for _ in range(2):
        free_passed(pool, seq)
        # The query at 16 reads positions 11 to 16: from block 2 on.
        is_passed = [entry == NO_BLOCK for entry in seq.block_table[1::2]]
        assert is_passed == [True] * num_passed + [False] * (6 - num_passed)
        assert NO_BLOCK not in seq.block_table[::2]
        assert (seq.num_passed_blocks, pool.num_available) == (num_passed, 16 - 12 + num_passed)
