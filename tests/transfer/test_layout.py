from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.errors import TransferError
from tandem.transfer.layout import KvLayout, Run, merge_adjacent, streams

LAYOUT = KvLayout(num_layers=28, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")


def test_a_block_of_qwen3_0_6b_is_1_8_megabytes() -> None:
    assert LAYOUT.layer_bytes == 2 * 8 * 16 * 128 * 2
    assert LAYOUT.block_bytes == 28 * 65_536


def test_a_rank_of_four_holds_a_quarter_of_each_block() -> None:
    rank = replace(LAYOUT, tp_size=4)
    assert rank.heads_per_rank == 2
    assert rank.layer_bytes * 4 == LAYOUT.layer_bytes
    assert rank.block_bytes * 4 == LAYOUT.block_bytes
    assert rank.head_bytes == LAYOUT.head_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 29},
        {"num_kv_heads": 4},
        {"block_size": 32},
        {"head_dim": 64},
        {"dtype": "float16"},
        {"checksum": "mix64"},
        {"checksum": "none"},
    ],
)
def test_layouts_that_differ_anywhere_have_different_digests(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)
    assert other.digest() != LAYOUT.digest()
    assert other.describe() != LAYOUT.describe()
    assert replace(LAYOUT).digest() == LAYOUT.digest()


def test_workers_of_different_widths_agree_on_the_layout() -> None:
    assert replace(LAYOUT, tp_size=4).digest() == LAYOUT.digest()


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(TransferError, match="int4"):
        replace(LAYOUT, dtype="int4")


@pytest.mark.parametrize("tp_size", [-1, 0, 3, 16])
def test_heads_that_cannot_be_dealt_out_evenly_are_refused(tp_size: int) -> None:
    with pytest.raises(TransferError, match=f"8 KV heads can't be dealt out to {tp_size} ranks"):
        replace(LAYOUT, tp_size=tp_size)


@pytest.mark.parametrize("widths", [(2, 3), (3, 2), (4, 6), (0, 1), (1, 0), (16, 1), (1, 16)])
def test_widths_of_which_neither_divides_the_other_or_the_heads_are_refused(
    widths: tuple[int, int],
) -> None:
    with pytest.raises(TransferError, match="8 KV heads can't go from"):
        streams(8, *widths)


def test_blocks_adjacent_on_both_sides_merge() -> None:
    pairs = [(1, 5), (2, 6), (3, 7), (4, 9), (5, 10), (7, 11), (6, 10)]
    assert merge_adjacent(pairs) == [Run(1, 5, 3), Run(4, 9, 2), Run(7, 11, 1), Run(6, 10, 1)]
    assert merge_adjacent([]) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_runs_hold_the_same_pairs_in_the_same_order(pairs: list[tuple[int, int]]) -> None:
    unmerged = [
        (run.local_block + i, run.remote_block + i)
        for run in merge_adjacent(pairs)
        for i in range(run.count)
    ]
    assert unmerged == pairs
