"""The seam between the transfer agent and the library that moves bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    Pool = torch.Tensor | NDArray[Any]  # contiguous; without a GPU it needs no torch

Memory = Literal["DRAM", "VRAM"]
Operation = Literal["WRITE", "READ"]

Indices = Sequence[int] | NDArray[np.int32]

# (offset in the block, length), both in bytes: pieces of a block that can be moved separately.
Parts = tuple[tuple[int, int], ...]


class Event(Protocol):
    """The end of work of a device, as CUDA's events."""

    def query(self) -> bool:
        """Return True once it has happened."""


class KvMemory(Protocol):
    """A KV pool, as its owner describes it.

    The spare blocks come after the others and hold no request's KV: transfers are measured on them.
    """

    base_address: int
    block_bytes: int
    num_blocks: int
    num_spare_blocks: int
    memory: Memory
    device_id: int

    @property
    def tensor(self) -> "Pool":
        """Return the memory: [num_blocks + num_spare_blocks, layers, 2, heads, block_size, dim]."""


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Blocks of one size, adjacent in one piece of memory: a pool as a transport sees it."""

    base_address: int
    block_bytes: int
    num_blocks: int  # the spare blocks included
    memory: Memory
    device_id: int


class Transport(Protocol):
    """One-sided transfers of parts of blocks between registered pools. Used from one thread only.

    Every method raises TransferError when the library fails, however the library reports that.
    """

    def register(self, grid: BlockGrid) -> None:
        """Open this process's pool to its peers, and use it as the near end of own transfers."""

    def metadata(self) -> bytes:
        """Return the data with which a peer can reach the registered pool."""

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        """Make a peer with the pool `grid` reachable; return its name."""

    def remove_peer(self, peer: str) -> None:
        """Disconnect. The handles of this peer must have been released."""

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        """Return descriptors of these parts of every block of both pools, kept until `remove_peer`.

        Part i of one side belongs to part i of the other and has the same length. In both tables
        the part has the index `block_id * len(parts) + i`.
        """

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Indices,
        remote_indices: Indices,
        notice: bytes,
    ) -> object:
        """Begin one transfer over tables of `prepare`; may block until it is complete.

        The peer gets `notice` after the data of a WRITE; a READ has none (empty). Return a handle
        that the caller polls until the transfer is complete, and releases in every case.
        """

    def poll(self, handle: object) -> bool:
        """Return True once the transfer is complete at both ends; TransferError if it failed."""

    def release(self, handle: object) -> None:
        """Give the handle back; an incomplete write may or may not land. Never raises."""

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a message that belongs to no write."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return the (peer, message) pairs since the last call; also advance peers' transfers."""

    def close(self) -> None:
        """Release everything, in the order that the library needs."""
