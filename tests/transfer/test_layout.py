from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.errors import TransferError
from tandem.transfer.layout import KvLayout, Run, merge_adjacent

LAYOUT = KvLayout(num_layers=28, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")


def test_a_block_of_qwen3_0_6b_is_1_8_megabytes() -> None:
    assert LAYOUT.layer_bytes == 2 * 8 * 16 * 128 * 2
    assert LAYOUT.block_bytes == 28 * 65_536


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 29},
        {"num_kv_heads": 4},
        {"block_size": 32},
        {"head_dim": 64},
        {"dtype": "float16"},
        {"checksum": "mix64"},
    ],
)
def test_layouts_that_differ_anywhere_have_different_digests(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)
    assert other.digest() != LAYOUT.digest()
    assert other.describe() != LAYOUT.describe()
    assert replace(LAYOUT).digest() == LAYOUT.digest()


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(TransferError, match="int4"):
        replace(LAYOUT, dtype="int4")


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
