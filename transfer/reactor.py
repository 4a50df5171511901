"""What the transfer thread does: peers, posted writes and their completion. No thread, no asyncio.

A write that fails takes the connection to its peer with it: only a torn connection proves that
nothing of it, and nothing of its siblings, can land later.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.runtime.errors import TransferError
from tandem.runtime.messages import TransferMetadata
from tandem.transfer.transport import BlockGrid, Transport

HELLO = b"TNDMHELO"  # opens the connection of a pair before its first write; means nothing else

_FORGET = 0.95  # per write: one stall must not shorten the leases of a whole day

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """One write to post: (local, remote) block pairs, and what the peer hears after the data.

    Nothing is posted from `post_before` on, a `time.perf_counter()` reading.
    """

    peer_instance: str
    peer_epoch: str
    pairs: Sequence[tuple[int, int]]
    notice: bytes
    post_before: float | None
    on_done: Callable[[TransferError | None], None]


@dataclass(slots=True)
class _Peer:
    name: str
    epoch: str
    num_blocks: int


@dataclass(slots=True, eq=False)
class _Write:
    order: WriteOrder
    handle: object
    posted_at: float


class TransferReactor:
    """Drives one transport. Every method runs on the transfer thread."""

    def __init__(
        self, name: str, transport: Transport, num_blocks: int, write_timeout_s: float
    ) -> None:
        self._name = name
        self._transport = transport
        self._num_blocks = num_blocks
        self._write_timeout_s = write_timeout_s
        self._peers: dict[str, _Peer] = {}
        self._writes: list[_Write] = []
        self.longest_write_s = 0.0  # from post to completion; forgets with each write

    @property
    def num_writes(self) -> int:
        """Writes posted and not complete."""
        return len(self._writes)

    def connect(self, peer: TransferMetadata) -> None:
        """Make `peer` writable; idempotent per epoch, and an older epoch of it is dropped."""
        known = self._peers.get(peer.instance_id)
        if known is not None and known.epoch == peer.epoch:
            return
        self.drop_peer(peer.instance_id, "it restarted")
        grid = BlockGrid(
            peer.base_address, peer.block_bytes, peer.num_blocks, peer.memory, peer.device_id
        )
        name = self._transport.add_peer(peer.agent_metadata, grid)
        try:
            if name != f"{peer.instance_id}.{peer.epoch}":
                raise TransferError(
                    f"the metadata of {peer.instance_id}.{peer.epoch} is that of {name}"
                )
            self._transport.notify(name, HELLO)
        except TransferError:
            self._transport.remove_peer(name)
            raise
        self._peers[peer.instance_id] = _Peer(name, peer.epoch, peer.num_blocks)
        logger.info("transfer agent %s connected to %s", self._name, name)

    def drop_peer(self, instance_id: str, reason: str) -> None:
        """Tear the connection down; writes under way to it fail. Unknown peers are fine."""
        peer = self._peers.pop(instance_id, None)
        if peer is None:
            return
        doomed = [w for w in self._writes if w.order.peer_instance == instance_id]
        self._writes = [w for w in self._writes if w.order.peer_instance != instance_id]
        for write in doomed:
            self._transport.release(write.handle)
        self._transport.remove_peer(peer.name)
        logger.info("transfer agent %s dropped %s: %s", self._name, peer.name, reason)
        for write in doomed:
            write.order.on_done(TransferError(f"write to {peer.name}: {reason}"))

    def post(self, order: WriteOrder) -> None:
        """Post a write; `on_done` hears of its end, exactly once, maybe within this call."""
        try:
            peer = self._checked_peer(order)
        except TransferError as exc:
            order.on_done(exc)
            return
        posted_at = time.perf_counter()
        try:
            handle = self._transport.post_write(
                peer.name,
                [local for local, _ in order.pairs],
                [remote for _, remote in order.pairs],
                order.notice,
            )
        except TransferError as exc:
            self.drop_peer(order.peer_instance, f"a write failed: {exc.message}")
            order.on_done(exc)
            return
        self._writes.append(_Write(order, handle, posted_at))

    def notify(self, peer_instance: str, notice: bytes) -> None:
        """Send a message that belongs to no write."""
        peer = self._peers.get(peer_instance)
        if peer is None:
            raise TransferError(f"notify {peer_instance}: not connected")
        self._transport.notify(peer.name, notice)

    def poll(self) -> list[bytes]:
        """Finish what is complete, give up what is late; the messages that came."""
        now = time.perf_counter()
        for write in list(self._writes):
            if write in self._writes:  # else it went with its peer, in this very loop
                self._poll_write(write, now)
        return [notice for _, notice in self._transport.notifications() if notice != HELLO]

    def close(self) -> None:
        """Drop every peer, then the transport."""
        for instance_id in list(self._peers):
            self.drop_peer(instance_id, "the agent closes")
        self._transport.close()

    def _checked_peer(self, order: WriteOrder) -> _Peer:
        peer = self._peers.get(order.peer_instance)
        target = f"write to {order.peer_instance}.{order.peer_epoch}"
        if peer is None or peer.epoch != order.peer_epoch:
            raise TransferError(f"{target}: not connected")
        if not order.pairs:
            raise TransferError(f"{target}: no blocks")
        for local, remote in order.pairs:
            if not (0 <= local < self._num_blocks and 0 <= remote < peer.num_blocks):
                raise TransferError(
                    f"{target}: block {local} of {self._num_blocks} to block {remote} of "
                    f"{peer.num_blocks} is out of range"
                )
        if order.post_before is not None and time.perf_counter() >= order.post_before:
            raise TransferError(f"{target}: its lease is over")
        return peer

    def _poll_write(self, write: _Write, now: float) -> None:
        instance_id = write.order.peer_instance
        try:
            done = self._transport.poll(write.handle)
        except TransferError as exc:
            self.drop_peer(instance_id, exc.message)
            return
        if done:
            took_s = time.perf_counter() - write.posted_at
            self.longest_write_s = max(took_s, _FORGET * self.longest_write_s)
            self._writes.remove(write)
            self._transport.release(write.handle)
            write.order.on_done(None)
        elif now - write.posted_at > self._write_timeout_s:
            self.drop_peer(instance_id, f"a write took more than {self._write_timeout_s} s")
