"""The seam between the transfer agent and the library that moves bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Memory = Literal["DRAM", "VRAM"]
Operation = Literal["WRITE", "READ"]

Indices = Sequence[int] | NDArray[np.int32]

# (offset in the block, length), both in bytes: the pieces of a block that can be moved alone.
Parts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Blocks of one size, one behind the other in one piece of memory."""

    base_address: int
    block_bytes: int
    num_blocks: int
    memory: Memory
    device_id: int


class Transport(Protocol):
    """One-sided transfers of parts of blocks between registered pools. Used from one thread only.

    Every method raises TransferError when the library fails, whichever way it says so.
    """

    def register(self, grid: BlockGrid) -> None:
        """Open this process's pool to its peers, and as the near end of its own transfers."""

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered pool."""

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        """The peer's name; `grid` is its pool."""

    def remove_peer(self, peer: str) -> None:
        """Disconnect. The handles of this peer must have been released."""

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        """The descriptors of these parts of every block of both pools; kept until `remove_peer`.

        Part i of one side goes with part i of the other and is as long. In both tables the part
        has the index `block_id * len(parts) + i`.
        """

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Indices,
        remote_indices: Indices,
        notice: bytes,
    ) -> object:
        """Begin one transfer over tables of `prepare`; may block for its whole length.

        The peer gets `notice` after the data of a WRITE; READs carry none (empty). Returns a
        handle that the caller polls until it is done and releases in every case.
        """

    def poll(self, handle: object) -> bool:
        """True when the transfer is complete at both ends; TransferError when it failed."""

    def release(self, handle: object) -> None:
        """Give the handle back; a write that was not done may or may not land. Never raises."""

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a message that belongs to no write."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) pairs that came since the last call; also makes progress for peers."""

    def close(self) -> None:
        """Release everything, in the order that the library wants."""
