"""The groups of sequences that share a prefix, against tables compared one by one."""

import random

import pytest
import torch

from tandem.kernels.attention.prefixes import LEVELS, SharedPrefixes, share_prefixes
from tests.kernels.conftest import DEVICE


def share(
    tables: list[list[int]], lens: list[int], block_size: int = 4, tile: int = 4, most: int = 9
) -> SharedPrefixes:
    width = max(map(len, tables))
    padded = [table + [77] * (width - len(table)) for table in tables]
    return share_prefixes(
        torch.tensor(padded, device=DEVICE),
        torch.tensor(lens, device=DEVICE),
        block_size,
        tile,
        most,
    )


def groups(shared: SharedPrefixes, level: int) -> list[list[int]]:
    seqs, counts = shared.seqs[level].tolist(), shared.counts[level].tolist()
    return [seqs[at : at + count] for at, count in enumerate(counts) if count]


def test_sequences_share_what_all_with_their_first_block_have_in_common() -> None:
    tables = [[1, 2, 3, 4], [9, 2, 3], [1, 2, 3, 5], [1, 2, 6, 7], [9, 8]]
    shared = share(tables, [16, 12, 14, 13, 5])
    assert groups(shared, 0) == [[0, 2, 3], [1, 4]]
    assert shared.ends[0].tolist() == [8, 4, 8, 8, 4]


def test_those_that_go_on_together_share_what_follows() -> None:
    tables = [[1, 2, 3, 4], [1, 5, 6, 7], [1, 2, 3, 8], [1, 5, 9], [1, 5, 6, 11], [1]]
    shared = share(tables, [16, 16, 13, 10, 14, 3])
    assert groups(shared, 0) == [[0, 1, 2, 3, 4]]
    assert groups(shared, 1) == [[0, 2], [1, 3, 4]]
    assert shared.ends.tolist() == [[4, 4, 4, 4, 4, 0], [12, 8, 12, 8, 8, 0]]


def test_the_block_of_a_query_is_its_own_and_padding_shares_nothing() -> None:
    shared = share([[1, 2], [1, 2], [1, 2], [1, 2]], [8, 9, 0, 0])
    assert groups(shared, 0) == [[0, 1]]
    assert shared.ends[0].tolist() == [4, 4, 0, 0]
    assert not share([[1], [1]], [4, 4]).counts.any()


def test_a_level_ends_where_a_tile_does() -> None:
    tables = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 9, 10, 11]]
    shared = share(tables, [24, 24, 24], tile=8)
    assert shared.ends.tolist() == [[8, 8, 8], [16, 16, 8]]
    assert not share(tables, [24, 24, 24], tile=32).counts.any()


def test_large_groups_are_several() -> None:
    shared = share([[1, 2]] * 7, [7] * 7, most=3)
    assert groups(shared, 0) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("seed", range(20))
def test_every_group_reads_the_same_blocks_and_every_sequence_each_of_them_once(seed: int) -> None:
    draw = random.Random(seed)
    block_size, tile, most = draw.choice([1, 4, 7]), draw.choice([2, 4, 8]), draw.randint(2, 5)
    tables = [[draw.choice([1, 1, 1, 2]) for _ in range(9)] for _ in range(draw.randint(1, 12))]
    lens = [draw.randint(0, 9 * block_size) for _ in tables]
    shared = share(tables, lens, block_size, tile, most)
    begins = [0] * len(tables)
    for level in range(LEVELS):
        ends = shared.ends[level].tolist()
        seen = [seq for group in groups(shared, level) for seq in group]
        assert sorted(seen) == [seq for seq, end in enumerate(ends) if end > begins[seq]]
        for group in groups(shared, level):
            assert len(group) <= most
            begin, end = begins[group[0]], ends[group[0]]
            assert begin % tile == end % tile == 0
            heads = {tuple(tables[seq][: -(-end // block_size)]) for seq in group}
            assert len(heads) == 1
            assert {(begins[seq], ends[seq]) for seq in group} == {(begin, end)}
            assert all(end < lens[seq] for seq in group)
        begins = ends
