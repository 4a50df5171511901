"""Exchanges of the ranks of a model on GPUs: sums, columns and rows, as in kernels.cpu.ranks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.ranks.lanes import NUM_LANES, PLACE_NUMBERS, load_from, meet, place_of
from tandem.kernels.sizes import cdiv

_FEW_NUMBERS = 1024  # of a piece, where lanes would idle with pieces of PLACE_NUMBERS
_THREAD_NUMBERS = 8  # of a piece; those of eight ranks fit the registers
_SHARES = (2, 4, 8)


class PeerMemory(Protocol):
    """MEMORY_BYTES of each rank, zeroed, as torch's symmetric memory describes them."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def buffer_ptrs(self) -> list[int]:
        """The addresses of all ranks' memory, as this rank reaches them, on 16-byte boundaries."""


class DeviceExchange:
    """One rank's end of the exchanges.

    All ranks must make the same calls in the same order, on one stream each. What a call launches
    ends when all ranks have launched it: nothing but the end of the process frees a rank that waits
    for one that is lost.
    """

    def __init__(self, memory: PeerMemory, device: torch.device) -> None:
        assert memory.world_size in _SHARES
        self._memory = memory  # owns it
        self.rank, self.num_ranks = memory.rank, memory.world_size
        self._memories = torch.tensor(memory.buffer_ptrs, dtype=torch.int64, device=device)
        self._rounds = torch.zeros(NUM_LANES, dtype=torch.int32, device=device)

    def add_up(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of all ranks' contiguous float32 parts, rounded once to `dtype`.

        They are added pairwise, neighbors first.
        """
        out = torch.empty(part.shape, dtype=dtype, device=part.device)
        self._add_up(part, out)
        return out

    def join_columns(self, part: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Return the ranks' columns [starts[rank], starts[rank + 1]) side by side at rank 0.

        `part` [num_rows, own columns] is contiguous; the other ranks get their own part back.
        """
        assert part.is_contiguous() and len(starts) == self.num_ranks + 1
        assert part.dtype in (torch.float32, torch.bfloat16, torch.float16)  # go by float32
        out = part if self.rank else part.new_empty(len(part), starts[-1])
        widest = max(b - a for a, b in pairwise(starts))
        num_in_row = cdiv(widest, PLACE_NUMBERS)
        num_pieces = len(part) * num_in_row
        assert len(part) * starts[-1] < 2**31
        if num_pieces == 0:
            return out
        join_columns_kernel[(min(num_pieces, NUM_LANES),)](
            part,
            out,
            self._memories,
            self._rounds,
            num_pieces,
            STARTS=tuple(starts),
            NUM_IN_ROW=num_in_row,
            RANK=self.rank,
            NUM_RANKS=self.num_ranks,
            BLOCK=PLACE_NUMBERS,
            num_warps=_num_warps(PLACE_NUMBERS),
            **launch_options(),
        )
        return out

    def share_rows(self, rows: torch.Tensor, owners: torch.Tensor) -> None:
        """Fill every row of `rows` with its owner's; `owners` [num_rows] are ranks."""
        # A number plus -0.0 is the number itself, 0.0 and -0.0 too.
        mine = (owners == self.rank).unsqueeze(1)
        self._add_up(rows.float().masked_fill(~mine, -0.0), rows)

    def _add_up(self, part: torch.Tensor, out: torch.Tensor) -> None:
        count = part.numel()
        assert part.dtype == torch.float32 and part.is_contiguous() and out.is_contiguous()
        assert count < 2**31
        if count == 0:
            return
        block = _FEW_NUMBERS if count <= NUM_LANES * _FEW_NUMBERS else PLACE_NUMBERS
        num_pieces = cdiv(count, block)
        add_up_kernel[(min(num_pieces, NUM_LANES),)](
            part,
            out,
            self._memories,
            self._rounds,
            count,
            num_pieces,
            RANK=self.rank,
            NUM_RANKS=self.num_ranks,
            BLOCK=block,
            num_warps=_num_warps(block),
            **launch_options(),
        )


def _num_warps(block: int) -> int:
    return block // (32 * _THREAD_NUMBERS)


@triton.jit(do_not_specialize=["num_pieces"])  # type: ignore[untyped-decorator]
def add_up_kernel(  # type: ignore[no-untyped-def]
    part,  # [count]
    out,  # [count]
    memories,  # [NUM_RANKS], addresses
    rounds,  # [num_lanes]
    count,
    num_pieces,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (num_lanes,)
    my_lane = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    wait_for_predecessor()
    my_round = tl.load(rounds + my_lane)
    for my_piece in range(my_lane, num_pieces, tl.num_programs(0)):
        my_round += 1
        my_numbers = my_piece * BLOCK + columns
        mask = my_numbers < count
        own = tl.load(part + my_numbers, mask=mask, other=0.0)
        tl.store(place_of(memories, RANK, my_lane, my_round) + columns, own)
        meet(memories, my_lane, my_round, RANK, NUM_RANKS)
        total = _sum_of(memories, my_lane, my_round, columns, 0, NUM_RANKS)
        tl.store(out + my_numbers, total.to(out.dtype.element_ty), mask=mask)
    tl.store(rounds + my_lane, my_round)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of(  # type: ignore[no-untyped-def]
    memories, my_lane, my_round, columns, FIRST: tl.constexpr, NUM_RANKS: tl.constexpr
):
    if NUM_RANKS == 1:
        return load_from(memories, FIRST, my_lane, my_round, columns)
    else:
        HALF: tl.constexpr = NUM_RANKS // 2
        lower = _sum_of(memories, my_lane, my_round, columns, FIRST, HALF)
        return lower + _sum_of(memories, my_lane, my_round, columns, FIRST + HALF, HALF)


@triton.jit(do_not_specialize=["num_pieces"])  # type: ignore[untyped-decorator]
def join_columns_kernel(  # type: ignore[no-untyped-def]
    part,  # [num_rows, STARTS[RANK + 1] - STARTS[RANK]]
    out,  # [num_rows, STARTS[NUM_RANKS]] at rank 0
    memories,  # [NUM_RANKS], addresses
    rounds,  # [num_lanes]
    num_pieces,
    STARTS: tl.constexpr,
    NUM_IN_ROW: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (num_lanes,); a piece is BLOCK columns of one row of every rank
    my_lane = tl.program_id(0)
    MY_WIDTH: tl.constexpr = STARTS[RANK + 1] - STARTS[RANK]
    wait_for_predecessor()
    my_round = tl.load(rounds + my_lane)
    for my_piece in range(my_lane, num_pieces, tl.num_programs(0)):
        my_round += 1
        my_row = my_piece // NUM_IN_ROW
        columns = my_piece % NUM_IN_ROW * BLOCK + tl.arange(0, BLOCK)
        my_numbers = part + my_row * MY_WIDTH + columns
        own = tl.load(my_numbers, mask=columns < MY_WIDTH, other=0.0).to(tl.float32)
        my_place = place_of(memories, RANK, my_lane, my_round) + tl.arange(0, BLOCK)
        tl.store(my_place, own)
        meet(memories, my_lane, my_round, RANK, NUM_RANKS)
        if RANK == 0:
            for rank in tl.static_range(NUM_RANKS):
                theirs = load_from(memories, rank, my_lane, my_round, tl.arange(0, BLOCK))
                to = out + my_row * STARTS[NUM_RANKS] + STARTS[rank] + columns
                is_theirs = columns < STARTS[rank + 1] - STARTS[rank]
                tl.store(to, theirs.to(out.dtype.element_ty), mask=is_theirs)
    tl.store(rounds + my_lane, my_round)
