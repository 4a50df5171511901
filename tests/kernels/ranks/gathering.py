"""Ranks as processes that gather by gloo. `gathering NUM FOLDER`: each saves what it got there."""

import sys
from itertools import pairwise
from pathlib import Path

import torch

from tandem.kernels.ranks.gathered import TWO_STEP_NUMBERS, GatheredExchange
from tests.kernels.ranks.forked import columns, logits, parts, rows, save_of_each

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 8), (1, 1), (3, 65), (2, 2100), (TWO_STEP_NUMBERS // 64, 64), (513, 1023))
SUMS = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]


def run(exchange: GatheredExchange) -> dict[str, list[torch.Tensor]]:
    rank, num_ranks = exchange.rank, exchange.num_ranks
    exchange.check()
    sums = [exchange.add_up(parts(num_ranks, shape)[rank], dtype) for shape, dtype in SUMS]
    starts = columns(num_ranks)
    mine = slice(*list(pairwise(starts))[rank])
    joined = [exchange.join_columns(logits(num_ranks, each)[:, mine], starts) for each in DTYPES]
    whole, owners = rows(num_ranks)
    own = whole.masked_fill((owners != rank).unsqueeze(1), torch.nan)
    exchange.share_rows(own, owners)
    shared = torch.full((3,), rank + 5)
    exchange.share(shared)
    least = torch.tensor(exchange.least(100 - rank))
    return {"sums": sums, "columns": joined, "rows": [own], "shared": [shared], "least": [least]}


def main(num_ranks: int, folder: Path) -> None:
    def run_rank(rank: int) -> dict[str, list[torch.Tensor]]:
        return run(GatheredExchange(str(folder), rank, num_ranks, torch.device("cpu"), 60.0))

    save_of_each(num_ranks, folder, run_rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
