"""The exchanges of ranks.c: sums, columns and rows of the processes that compute one model."""

import ctypes
import mmap
from collections.abc import Sequence
from itertools import pairwise

import torch

from tandem.kernels.cpu.launch import DTYPES, INT, LONG, POINTER, fields, function
from tandem.kernels.ranks.missing import MissingRankError

LINE_BYTES = 64
MAX_RANKS = 8
BUFFER_BYTES = 1 << 20
_WAITED = 2  # the place of waited_ns in a line, in numbers of 8 bytes


class _Ranks(ctypes.Structure):
    """struct ranks"""

    _fields_ = fields(
        (POINTER, "lines buffers"),
        (LONG, "buffer_bytes rank num_ranks leader_pid patience_ms"),
        (ctypes.c_uint32, "round"),
    )


_meet = function("meet", POINTER)
_add_up = function("add_up", *[POINTER] * 3, LONG, INT)
_join_columns = function("join_columns", *[POINTER] * 3, LONG, POINTER)
_share_rows = function("share_rows", *[POINTER] * 2, LONG, LONG, POINTER)
_end_waiting = function("end_waiting", POINTER)


def shared_bytes(num_ranks: int, buffer_bytes: int) -> int:
    """Return the size of the memory that the ranks share."""
    return num_ranks * LINE_BYTES + 2 * num_ranks * buffer_bytes


class RankExchange:
    """One process's end of the exchanges, over `memory` of shared_bytes, zeroed at first.

    All ranks must make the same calls in the same order. A call raises MissingRankError when a
    rank does not arrive within `patience_s`, when `end` was called, or when rank 0's process
    `leader_pid`, the parent of the others, is gone.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        num_ranks: int,
        buffer_bytes: int,
        leader_pid: int,
        patience_s: float,
    ) -> None:
        assert 0 <= rank < num_ranks and num_ranks in (2, 4, MAX_RANKS)
        assert buffer_bytes % LINE_BYTES == 0
        self.rank, self.num_ranks, self.buffer_bytes = rank, num_ranks, buffer_bytes
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        assert len(self._memory) >= shared_bytes(num_ranks, buffer_bytes)
        lines = self._memory.data_ptr()
        self._ranks = _Ranks(
            lines,
            lines + num_ranks * LINE_BYTES,
            buffer_bytes,
            rank,
            num_ranks,
            leader_pid,
            int(patience_s * 1000),
            0,
        )
        self._pointer = ctypes.addressof(self._ranks)

    def meet(self) -> None:
        """Return once every rank has called it."""
        self._check(_meet(self._pointer))

    def add_up(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of all ranks' contiguous float32 parts, rounded once to `dtype`."""
        assert part.dtype == torch.float32 and part.is_contiguous()
        out = torch.empty(part.shape, dtype=dtype)
        where = part.data_ptr(), out.data_ptr(), part.numel()
        self._check(_add_up(self._pointer, *where, DTYPES[dtype]))
        return out

    def join_columns(self, part: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Return the ranks' columns [starts[rank], starts[rank + 1]) side by side at rank 0.

        `part` [num_rows, own columns] is contiguous; the other ranks get their own part back.
        """
        assert part.is_contiguous() and len(starts) == self.num_ranks + 1
        size = part.element_size()
        assert max(b - a for a, b in pairwise(starts)) * size <= self.buffer_bytes
        in_bytes = torch.tensor(starts, dtype=torch.int64) * size
        out = part if self.rank else part.new_empty(len(part), starts[-1])
        where = part.data_ptr(), out.data_ptr(), len(part), in_bytes.data_ptr()
        self._check(_join_columns(self._pointer, *where))
        return out

    def share_rows(self, rows: torch.Tensor, owners: torch.Tensor) -> None:
        """Fill every row of `rows` with its owner's; `owners` [num_rows] are int64 ranks."""
        assert rows.is_contiguous() and owners.is_contiguous() and owners.dtype == torch.int64
        row_bytes = rows.shape[1] * rows.element_size()
        assert row_bytes <= self.buffer_bytes
        where = rows.data_ptr(), len(rows), row_bytes, owners.data_ptr()
        self._check(_share_rows(self._pointer, *where))

    def waited_s(self) -> list[float]:
        """Return how long each rank has waited for the others; the latest one waits least."""
        lines = self._memory[: self.num_ranks * LINE_BYTES].view(torch.int64)
        return [ns / 1e9 for ns in lines.view(self.num_ranks, -1)[:, _WAITED].tolist()]

    def end(self) -> None:
        """Let every rank's waiting calls fail, those of other threads and processes too."""
        _end_waiting(self._pointer)

    def _check(self, missing: int) -> None:
        if missing:
            raise MissingRankError(missing - 1)
