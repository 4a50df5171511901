from dataclasses import replace

import pytest

from tandem.runtime.errors import TransferError
from tandem.transfer.layout import KvLayout, rank_pairs

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


def test_ranks_beyond_the_heads_hold_a_replica_each() -> None:
    for tp_size in (8, 16, 32):
        rank = replace(LAYOUT, tp_size=tp_size)
        assert rank.heads_per_rank == 1 and rank.block_bytes * 8 == LAYOUT.block_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 29}, {"num_kv_heads": 4}, {"block_size": 32}, {"head_dim": 64},
        {"dtype": "float16"}, {"checksum": "mix64"}, {"windows": (0, 1024)}, {"checksum": "none"},
    ],
)  # fmt: skip
def test_layouts_that_differ_anywhere_have_different_digests(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)
    assert other.digest() != LAYOUT.digest()
    assert other.describe() != LAYOUT.describe()
    assert replace(LAYOUT).digest() == LAYOUT.digest()


def test_windows_are_in_the_layouts_of_models_that_have_some_alone() -> None:
    assert "windows" not in LAYOUT.describe()
    windowed = replace(LAYOUT, windows=(0, 1024, 1024))
    assert "windows=0,1024,1024" in windowed.describe()
    # Of a long prompt only the first group sends more with every token.
    assert windowed.token_bytes == LAYOUT.block_bytes / 16


@pytest.mark.parametrize(
    ("windows", "num_blocks", "num_tokens"),
    [
        ((0,), 8, 128),
        ((0, 20), 2, 16),
        ((0, 20), 5, 48),
        ((0, 20), 6, 48),  # the window touches three blocks
        ((0, 20), 8, 80),
        ((0, 20, 20), 9, 48),
        ((0, 0), 9, 80),
        ((20,), 3, 48),
        ((20,), 4, None),
    ],
)
def test_a_handoff_of_so_many_blocks_has_the_fewest_tokens_that_need_them(
    windows: tuple[int, ...], num_blocks: int, num_tokens: int | None
) -> None:
    layout = replace(LAYOUT, windows=windows)
    assert layout.block_size == 16 and layout.num_tokens(num_blocks) == num_tokens


def test_workers_of_different_widths_agree_on_the_layout() -> None:
    assert replace(LAYOUT, tp_size=4).digest() == LAYOUT.digest()


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(TransferError, match="int4"):
        replace(LAYOUT, dtype="int4")


@pytest.mark.parametrize("tp_size", [-1, 0, 3, 12])
def test_heads_that_cannot_be_dealt_out_evenly_are_refused(tp_size: int) -> None:
    with pytest.raises(TransferError, match=f"8 KV heads can't be divided evenly among {tp_size}"):
        replace(LAYOUT, tp_size=tp_size)


@pytest.mark.parametrize("widths", [(2, 3), (3, 2), (4, 6), (0, 1), (1, 0), (12, 1), (1, 12)])
def test_widths_that_do_not_fit_one_another_or_the_heads_are_refused(
    widths: tuple[int, int],
) -> None:
    with pytest.raises(TransferError, match="8 KV heads can't be moved"):
        rank_pairs(8, *widths)
