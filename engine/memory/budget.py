"""The KV pool's share of a GPU: the memory that is free at the peak of everything else."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.engine.config import EngineConfig

logger = logging.getLogger(__name__)

MIB = 2**20
# Not in the profile: pieces between the allocator's segments, libraries' own handles.
UNSEEN_BYTES = 256 * MIB
# A decode graph's kernels with their arguments, as the driver keeps them.
GRAPH_BYTES = 8 * MIB


class DeviceMemory(Protocol):
    """One GPU's memory, seen from this process."""

    def total_bytes(self) -> int:
        """Return the size of the memory."""

    def free_bytes(self) -> int:
        """Return the bytes that no process holds."""

    def held_bytes(self) -> int:
        """Return the bytes that this process holds, without unused cache."""

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the most that `run` holds beyond the bytes held already. Waits for it."""


class CudaMemory:
    """The memory of a CUDA device, by torch's and the driver's counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def held_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(slots=True, frozen=True)
class Reserve:
    """The bytes that a GPU must keep for steps, beside weights and KV pool."""

    step_bytes: int  # at the peak of the largest steps
    graph_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.step_bytes + self.graph_bytes + UNSEEN_BYTES


def kv_budget_bytes(config: EngineConfig, memory: DeviceMemory, reserve: Reserve) -> int:
    """Return the size of the KV pool, given that only the weights are loaded.

    Only the bytes of this process count against its fraction: a GPU may be shared.
    """
    allowed = int(memory.total_bytes() * config.kv_memory_fraction) - memory.held_bytes()
    free = memory.free_bytes()
    budget = max(0, min(allowed, free) - reserve.total_bytes)
    logger.info(
        "of %.0f MiB free, steps keep %.0f, their graphs %.0f and the KV pool gets %.0f",
        free / MIB,
        (reserve.step_bytes + UNSEEN_BYTES) / MIB,
        reserve.graph_bytes / MIB,
        budget / MIB,
    )
    return budget


def decode_graph_bytes(sizes: list[int], largest_step_bytes: int, logits_row_bytes: int) -> int:
    """Return the bytes of graphs of `sizes`: one pool, of the largest, and the logits of each."""
    return largest_step_bytes + sum(sizes) * logits_row_bytes + len(sizes) * GRAPH_BYTES
