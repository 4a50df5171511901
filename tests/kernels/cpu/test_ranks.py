"""The exchanges of ranks over shared memory; here each rank is a thread."""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import pytest
import torch

from tandem.kernels.cpu.ranks import RankExchange, shared_bytes
from tandem.kernels.ranks.missing import MissingRankError
from tests.kernels.tolerance import on_cpu

pytestmark = on_cpu

T = TypeVar("T")
BUFFER_BYTES = 1024
LEADER = os.getppid()  # of the process whose threads are ranks


def exchanges(num_ranks: int, patience_s: float = 60.0) -> list[RankExchange]:
    memory = mmap.mmap(-1, shared_bytes(num_ranks, BUFFER_BYTES))
    where = num_ranks, BUFFER_BYTES, LEADER, patience_s
    return [RankExchange(memory, rank, *where) for rank in range(num_ranks)]


def by_all(ranks: list[RankExchange], call: Callable[[RankExchange], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_sum_of_one_tree_rounded_once(
    num_ranks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    ranks = exchanges(num_ranks)
    for shape in ((0, 8), (1, 1), (3, 65), (7, 256)):  # the last takes several rounds
        parts = [torch.randn(shape) for _ in ranks]
        sums = parts
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        found = by_all(ranks, lambda rank, parts=parts: rank.add_up(parts[rank.rank], dtype))
        assert all(torch.equal(each, sums[0].to(dtype)) for each in found)


def test_columns_of_all_ranks_stand_side_by_side_at_rank_0() -> None:
    torch.manual_seed(0)
    ranks, starts = exchanges(4), [0, 10, 30, 32, 70]
    for num_rows in (0, 1, 40):
        whole = torch.randn(num_rows, 70)
        parts = [whole[:, a:b].contiguous() for a, b in pairwise(starts)]
        found = by_all(ranks, lambda rank, parts=parts: rank.join_columns(parts[rank.rank], starts))
        assert torch.equal(found[0], whole)


def test_every_rank_gets_the_rows_of_the_others() -> None:
    torch.manual_seed(0)
    ranks = exchanges(2)
    whole, owners = torch.randn(77, 33), torch.randint(0, 2, (77,))

    def share(rank: RankExchange) -> torch.Tensor:
        rows = whole.masked_fill((owners != rank.rank).unsqueeze(1), torch.nan)
        rank.share_rows(rows, owners)
        return rows

    assert all(torch.equal(rows, whole) for rows in by_all(ranks, share))


def test_ranks_that_arrive_at_different_times_stay_in_step() -> None:
    ranks = exchanges(4)

    def run(rank: RankExchange) -> list[float]:
        sums = []
        for number in range(2000):
            if (number * 7 + rank.rank * 3) % 11 == 0:
                sum(range(5000))  # a delay
            part = torch.tensor([float(number * 10 + rank.rank)])
            sums.append(float(rank.add_up(part, torch.float32)))
        return sums

    for sums in by_all(ranks, run):
        assert sums == [float(number * 40 + 6) for number in range(2000)]


def test_a_rank_that_does_not_arrive_is_named() -> None:
    first, _ = exchanges(2, patience_s=0.2)
    with pytest.raises(MissingRankError) as caught:
        first.meet()
    assert caught.value.rank == 1


def test_the_end_lets_waiting_ranks_go() -> None:
    first, second = exchanges(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.meet)
        second.end()
        with pytest.raises(MissingRankError):
            waiting.result(timeout=30)


def test_a_rank_whose_leader_is_gone_ends_its_wait() -> None:
    memory = mmap.mmap(-1, shared_bytes(2, BUFFER_BYTES))
    orphan = RankExchange(memory, 1, 2, BUFFER_BYTES, os.getpid(), 60.0)  # not the parent
    with pytest.raises(MissingRankError) as caught:
        orphan.meet()
    assert caught.value.rank == 0


def test_the_rank_that_is_late_waits_least() -> None:
    early, late = exchanges(2)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(early.meet)
        time.sleep(0.2)
        late.meet()
        met.result()
    waits_s = early.waited_s()
    assert waits_s == late.waited_s() and waits_s[0] > 0.1 > waits_s[1]
