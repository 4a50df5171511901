"""Ranks as processes that interpret the kernels, over memory that they share.

`forked NUM FOLDER`: each saves what its calls returned to a file of the folder. They are forks of
one process, which has PyTorch and Triton.
"""

import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from tandem.kernels.ranks.exchange import DeviceExchange
from tandem.kernels.ranks.lanes import MEMORY_BYTES, NUM_LANES, PLACE_NUMBERS

# The interpreter rounds to bfloat16 wrongly: those that are exact there are not rounded.
ROUNDED = (torch.float32, torch.float16)
EXACT = (torch.float32, torch.bfloat16)
SUMS = [(shape, dtype) for shape in ((0, 8), (1, 1), (3, 65), (2, 2100)) for dtype in ROUNDED]
SUMS.append(((NUM_LANES + 3, PLACE_NUMBERS), torch.float32))  # three lanes take two rounds
COLUMNS = (0, 10, 2100, 2130, 2131, 2140, 2150, 4400, 4500)  # where ranks' columns start, of 8
NUM_DELAYED = 40  # sums of ranks that come late by turns


@dataclass(frozen=True)
class Memory:
    """A PeerMemory that processes of one machine share."""

    rank: int
    world_size: int
    buffer_ptrs: list[int]


def parts(num_ranks: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(shape) for _ in range(num_ranks)]


def columns(num_ranks: int) -> list[int]:
    return list(COLUMNS[:: 8 // num_ranks])


def logits(num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(3, columns(num_ranks)[-1]).to(dtype)


def rows(num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    whole = torch.randn(9, 77).to(torch.bfloat16)
    whole[:, ::5], whole[:, 1::5] = 0.0, -0.0
    return whole, torch.randint(0, num_ranks, (9,))


def run(exchange: DeviceExchange) -> dict[str, list[torch.Tensor]]:
    rank, num_ranks = exchange.rank, exchange.num_ranks
    found: dict[str, list[torch.Tensor]] = {"sums": [], "columns": [], "rows": [], "delayed": []}
    for shape, dtype in SUMS:
        found["sums"].append(exchange.add_up(parts(num_ranks, shape)[rank], dtype))
    starts = columns(num_ranks)
    mine = slice(*list(pairwise(starts))[rank])
    for dtype in EXACT:
        part = logits(num_ranks, dtype)[:, mine].contiguous()
        found["columns"].append(exchange.join_columns(part, starts))
    whole, owners = rows(num_ranks)
    own = whole.masked_fill((owners != rank).unsqueeze(1), torch.nan)
    exchange.share_rows(own, owners)
    found["rows"].append(own)
    # Days later; rounds become negative. By an even number, else a rank would write at once where
    # a late one still reads.
    exchange._rounds.copy_(2**31 - NUM_DELAYED // 2 + exchange._rounds % 2)
    draw = random.Random(rank)
    for number in range(NUM_DELAYED):
        if draw.random() < 0.2:
            time.sleep(0.005)
        part = torch.tensor([float(number * 8 + rank)])
        found["delayed"].append(exchange.add_up(part, torch.float32))
    return found


def save_of_each(
    num_ranks: int, folder: Path, run_rank: Callable[[int], dict[str, list[torch.Tensor]]]
) -> None:
    """Save what each rank, a process of its own, returns to a file of the folder."""
    rank, others = 0, []
    for other in range(1, num_ranks):
        pid = os.fork()
        if pid == 0:
            rank, others = other, []
            break
        others.append(pid)
    torch.save(run_rank(rank), folder / f"{rank}.pt")
    if rank:
        os._exit(0)
    for pid in others:
        assert os.waitpid(pid, 0)[1] == 0


def main(num_ranks: int, folder: Path) -> None:
    memory = mmap.mmap(-1, num_ranks * MEMORY_BYTES)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    addresses = [first + rank * MEMORY_BYTES for rank in range(num_ranks)]

    def run_rank(rank: int) -> dict[str, list[torch.Tensor]]:
        return run(DeviceExchange(Memory(rank, num_ranks, addresses), torch.device("cpu")))

    save_of_each(num_ranks, folder, run_rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
