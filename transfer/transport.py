"""The seam between the transfer agent and the library that moves bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Memory = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Blocks of one size, one behind the other in one piece of memory."""

    base_address: int
    block_bytes: int
    num_blocks: int
    memory: Memory
    device_id: int


class Transport(Protocol):
    """One-sided writes of whole blocks between registered pools. Used from one thread only.

    Every method raises TransferError when the library fails, whichever way it says so.
    """

    def register(self, grid: BlockGrid) -> None:
        """Open this process's pool for writes from peers, and as the source of its own."""

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered pool."""

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        """The peer's name; `grid` is its pool. Prepares the descriptors of all its blocks."""

    def remove_peer(self, peer: str) -> None:
        """Disconnect. The handles of this peer must have been released."""

    def post_write(
        self, peer: str, local_blocks: Sequence[int], remote_blocks: Sequence[int], notice: bytes
    ) -> object:
        """Begin one write; the peer gets `notice` after the data. May block for its whole length.

        Returns a handle that the caller polls until it is done and releases in every case.
        """

    def poll(self, handle: object) -> bool:
        """True when the write is complete at the peer; TransferError when it failed."""

    def release(self, handle: object) -> None:
        """Give the handle back; a write that was not done may or may not land. Never raises."""

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a message that belongs to no write."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) pairs that came since the last call; also makes progress for peers."""

    def close(self) -> None:
        """Release everything, in the order that the library wants."""
