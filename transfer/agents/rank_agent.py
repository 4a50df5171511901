"""The seam between a worker's transfers and its ranks' agents, in this process or in others."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tandem.runtime.wire.cluster_messages import RankMetadata
from tandem.transfer.agents.reactor import PeerRank, Selection
from tandem.transfer.transport import BlockGrid, Event, Operation, Parts

NOTICE_BLOCK = struct.Struct("<IQ")  # an ordinal and a checksum

# A step's number and its layers whose K/V is stored, in the order in which a rank stores them.
Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Notice:
    """The notice of a write but for its checksums: `head`, then each ordinal with its block's."""

    head: bytes
    ordinals: Sequence[int] = ()

    def __call__(self, checksums: Sequence[int]) -> bytes:
        """Return the notice; without `ordinals` it has no checksums."""
        blocks = zip(self.ordinals, checksums, strict=bool(self.ordinals))
        return self.head + b"".join(NOTICE_BLOCK.pack(*block) for block in blocks)


NO_NOTICE = Notice(b"")


@runtime_checkable
class MarkedEvent(Event, Protocol):
    """An event of rank 0, and the mark that stands for it at the others."""

    @property
    def mark(self) -> Mark: ...


class RankAgent(Protocol):
    """Moves KV blocks between one rank's pool and those of its peers' ranks.

    Its coroutines run on the loop that called `start`. Failures are TransferErrors.
    """

    @property
    def longest_write_s(self) -> float:
        """The longest recent write, from post to completion; a lease's margin is at least this."""

    async def start(self, on_notification: Callable[[bytes], None]) -> None:
        """Register the pool. `on_notification` gets each incoming message, on this loop."""

    async def close(self) -> None:
        """Give everything back; transfers under way fail. Idempotent."""

    def metadata(self) -> RankMetadata:
        """Return the data with which peers can reach this pool; complete after `start`."""

    def expect(self, change: int) -> None:
        """Count one more (+1) or one less (-1) handoff; 0: KV is about to arrive."""

    async def connect(self, peer: PeerRank, metadata: bytes, grid: BlockGrid) -> bool:
        """Make `peer` reachable, drop an older epoch of it; False if it was reachable already."""

    async def prepare(self, peer: PeerRank, selection: Selection) -> None:
        """Make the descriptors of this selection now, so that no transfer has to."""

    async def disconnect(self, peer_instance: str) -> None:
        """Tear the connections down; transfers under way fail. Unknown peers are fine."""

    async def transfer(
        self,
        operation: Operation,
        peer: PeerRank,
        selection: Selection,
        pairs: Sequence[tuple[int, int]],
        notice: Callable[[Sequence[int]], bytes] = NO_NOTICE,
        *,
        checked: Parts | None = None,
        after: Event | None = None,
        post_before: float | None = None,
    ) -> bytes:
        """Move parts of blocks, `pairs` of (local, remote) ids; return once they have arrived.

        `notice`, of the checksums of the parts `checked` of the local blocks, which are computed
        once `after` has happened, follows the data of a WRITE and is returned; `checked` None: it
        gets none, and at once. Nothing is posted from `post_before` on (a `time.perf_counter()`
        reading: the lease's end less its margin). After a TransferError nothing more of the
        transfer is posted, but what was may still land (transfer/handoff/decode.py); `connect` must
        come before the next transfer. Cancelling the caller stops the waiting, not the transfer.
        """

    async def checksums(self, block_ids: Sequence[int], parts: Parts) -> list[int]:
        """Return checksums of parts of blocks of the pool."""
