"""Exchanges of ranks over torch.distributed, NCCL's on GPUs, with the sums of kernels.cpu.ranks.

A library's own sums run in an order that depends on their size and on the machine. Here it only
moves numbers: each rank adds up by itself, pairwise, neighbors first.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

# From here on each rank adds up a share of the numbers and sends the sums: fewer bytes in all, by
# two transfers in place of one. The order of sums is the same.
TWO_STEP_NUMBERS = 2**18

# The name that it has from PyTorch 2.13 on, or the one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatheredExchange:
    """One rank's end of the exchanges, over the process group that it joins.

    All ranks must make the same calls in the same order. On a GPU a call is work of the current
    stream, which a CUDA graph can hold, and ends when all ranks have launched it. Tensors without
    memory (of the meta device) go through without an exchange.
    """

    def __init__(
        self, folder: str, rank: int, num_ranks: int, device: torch.device, patience_s: float
    ) -> None:
        """Join the group of the ranks that meet in `folder`. Blocks; raises RuntimeError."""
        self.rank, self.num_ranks = rank, num_ranks
        self._device = device
        is_gpu = device.type == "cuda"
        self.library = "nccl" if is_gpu else "gloo"
        dist.init_process_group(
            self.library,
            init_method=f"file://{folder}/ranks",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=patience_s),
            device_id=device if is_gpu else None,
        )

    def check(self) -> None:
        """Raise RuntimeError where numbers do not arrive as the ranks sent them."""
        for count in (self.num_ranks, TWO_STEP_NUMBERS):
            numbers = torch.arange(count, dtype=torch.float32, device=self._device)
            found = self.add_up(numbers + self.rank, torch.float32)
            expected = numbers * self.num_ranks + sum(range(self.num_ranks))
            if not torch.equal(found, expected):
                raise RuntimeError("numbers arrive changed")

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        own = torch.tensor([number], dtype=torch.int64, device=self._device)
        return int(self._gathered(own).min())

    def share(self, numbers: torch.Tensor) -> None:
        """Fill `numbers` with those of rank 0."""
        dist.broadcast(numbers, 0)

    def add_up(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of all ranks' contiguous float32 parts, rounded once to `dtype`.

        They are added pairwise, neighbors first.
        """
        assert part.dtype == torch.float32 and part.is_contiguous()
        if part.is_meta:
            return part.to(dtype)
        count = part.numel()
        if count < TWO_STEP_NUMBERS or count % self.num_ranks:
            return _sum(self._gathered(part)).to(dtype)
        shares = part.view(self.num_ranks, -1)
        received = torch.empty_like(shares)
        dist.all_to_all_single(received, shares)
        return self._gathered(_sum(received).to(dtype)).view(part.shape)

    def join_columns(self, part: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Return the ranks' columns [starts[rank], starts[rank + 1]) side by side at rank 0.

        `part` [num_rows, own columns]; the other ranks get their own part back.
        """
        if part.is_meta:
            return part if self.rank else part.new_empty(len(part), starts[-1])
        widths = [end - start for start, end in pairwise(starts)]
        gathered = self._gathered(F.pad(part, (0, max(widths) - part.shape[1])))
        if self.rank:
            return part
        columns = zip(gathered.unbind(), widths, strict=True)
        return torch.cat([theirs[:, :width] for theirs, width in columns], 1)

    def share_rows(self, rows: torch.Tensor, owners: torch.Tensor) -> None:
        """Fill every row of `rows` with its owner's; `owners` [num_rows] are ranks."""
        # A number plus -0.0 is the number itself, 0.0 and -0.0 too.
        mine = (owners == self.rank).unsqueeze(1)
        rows.copy_(self.add_up(rows.float().masked_fill(~mine, -0.0), rows.dtype))

    def waited_s(self) -> list[float]:
        """Return nothing: the host does not see for how long a device has waited."""
        return []

    def end(self) -> None:
        """Let every call of this rank that waits fail, or return with numbers that mean nothing."""
        if (group := dist.group.WORLD) is not None:
            with suppress(RuntimeError):  # it has ended
                group.abort()

    def close(self) -> None:
        """Leave the group; no call is under way, and the other ranks may have ended."""
        if not dist.is_initialized():
            return
        if self._device.type == "cuda":
            self.end()  # else NCCL says farewell to the others
        dist.destroy_process_group()

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return [num_ranks, *part.shape]; `part` is contiguous."""
        out = part.new_empty(self.num_ranks, *part.shape)
        if part.numel():
            _all_gather(out.view(-1), part.view(-1))
        return out


def _sum(parts: torch.Tensor) -> torch.Tensor:
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]
