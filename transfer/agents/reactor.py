"""The work of the transfer thread: peers, posted transfers and their ends. No threads, no asyncio.

A failed transfer ends the connection to its peer: nothing more of the transfer and its siblings is
posted then; what was may still be on its way (transfer/handoff/decode.py). On a GPU copies between
processes wait on streams that a closed connection does not stop. There a failed transfer ends when
everything has run that the device had been given by then.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import BlockGrid, Operation, Parts, Transport

HELLO = b"TNDMHELO"  # opens the connection of a pair of ranks before its first write

_FORGET = 0.95  # per write: a single stall must not shorten leases for ever

_SETTLING_POLL_S = 0.001

# Begins to wait for all that a device has been given, and returns whether it has run by now.
Settle = Callable[[], Callable[[], bool]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerRank:
    """One rank of a peer."""

    instance_id: str
    epoch: str
    rank: int

    @property
    def key(self) -> tuple[str, int]:
        """The rank of the instance, whatever its epoch."""
        return self.instance_id, self.rank

    @property
    def agent_name(self) -> str:
        """The name of its transport."""
        return f"{self.instance_id}.{self.epoch}.{self.rank}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen parts of each block, of all parts into which both sides cut their blocks."""

    local_parts: Parts
    remote_parts: Parts
    chosen: range


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """One transfer to post, of (local, remote) block pairs; `notice` follows a WRITE.

    Nothing is posted from `post_before` on, a `time.perf_counter()` reading.
    """

    operation: Operation
    peer: PeerRank
    selection: Selection
    pairs: Sequence[tuple[int, int]]
    notice: bytes
    post_before: float | None
    on_done: Callable[[TransferError | None], None]


@dataclass(slots=True)
class _Peer:
    rank: PeerRank
    name: str
    grid: BlockGrid
    tables: dict[tuple[Parts, Parts], object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Transfer:
    order: TransferOrder
    handle: object
    posted_at: float


@dataclass(slots=True, frozen=True)
class _Settling:
    """Failed transfers whose copies may be under way until `is_over()`."""

    is_over: Callable[[], bool]
    end: Callable[[], None]


class TransferReactor:
    """Drives one transport. Every method runs on the transfer thread.

    `settle` belongs to a pool on a GPU; None: a closed connection ends its transfers.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        num_blocks: int,
        transfer_timeout_s: float,
        settle: Settle | None = None,
    ) -> None:
        self._name = name
        self._transport = transport
        self._num_blocks = num_blocks
        self._timeout_s = transfer_timeout_s
        self._peers: dict[tuple[str, int], _Peer] = {}  # by instance and rank
        self._settle = settle
        self._transfers: list[_Transfer] = []
        self._settling: list[_Settling] = []
        self.longest_write_s = 0.0  # from post to completion; decays with each write

    @property
    def num_transfers(self) -> int:
        """Transfers posted and not ended."""
        return len(self._transfers) + len(self._settling)

    def connect(self, peer: PeerRank, metadata: bytes, grid: BlockGrid) -> bool:
        """Make `peer` reachable, drop an older epoch of it; False if it was reachable already."""
        known = self._peers.get(peer.key)
        if known is not None and known.rank == peer:
            return False
        self._drop(peer.key, "it restarted")
        name = self._transport.add_peer(metadata, grid)
        try:
            if name != peer.agent_name:
                raise TransferError(f"the metadata of {peer.agent_name} is that of {name}")
            self._transport.notify(name, HELLO)
        except TransferError:
            self._transport.remove_peer(name)
            raise
        self._peers[peer.key] = _Peer(peer, name, grid)
        logger.info("transfer agent %s connected to %s", self._name, name)
        return True

    def drop_peer(self, instance_id: str, reason: str) -> None:
        """Tear the connections down; transfers under way fail. Unknown peers are fine."""
        for key in [key for key in self._peers if key[0] == instance_id]:
            self._drop(key, reason)

    def prepare(self, peer: PeerRank, selection: Selection) -> None:
        """Make the descriptors of this selection now, so that no transfer has to."""
        self._tables(self._connected(peer), selection)

    def post(self, order: TransferOrder) -> None:
        """Post a transfer; `on_done` is called once at its end, perhaps within this call."""
        selection = order.selection
        num_local, num_remote = len(selection.local_parts), len(selection.remote_parts)
        chosen = np.asarray(selection.chosen, dtype=np.int32)
        try:
            peer = self._checked_peer(order)
            tables = self._tables(peer, selection)
            blocks = np.asarray(order.pairs, dtype=np.int32)[:, :, None]
            local = (blocks[:, 0] * num_local + chosen).ravel()
            remote = (blocks[:, 1] * num_remote + chosen).ravel()
            posted_at = time.perf_counter()  # after everything that may take long
            if order.post_before is not None and posted_at >= order.post_before:
                raise TransferError(f"{order.operation} with {peer.name}: its lease is over")
        except TransferError as exc:
            order.on_done(exc)
            return
        try:
            handle = self._transport.post(order.operation, tables, local, remote, order.notice)
        except TransferError as exc:
            reason = f"a transfer failed: {exc.message}"
            self._drop(order.peer.key, reason, failed=(order, exc))
            return
        self._transfers.append(_Transfer(order, handle, posted_at))

    def notify(self, instance_id: str, notice: bytes) -> None:
        """Send a message that belongs to no write, to the first of the peer's ranks."""
        ranks = sorted(rank for known, rank in self._peers if known == instance_id)
        if not ranks:
            raise TransferError(f"notify {instance_id}: not connected")
        self._transport.notify(self._peers[instance_id, ranks[0]].name, notice)

    def poll(self) -> list[bytes]:
        """Finish complete transfers, give up late ones; return the messages that have arrived."""
        now = time.perf_counter()
        for transfer in list(self._transfers):
            if transfer in self._transfers:  # else it ended with its peer, earlier in this loop
                self._poll_transfer(transfer, now)
        self._end_settled()
        return [notice for _, notice in self._transport.notifications()]

    def close(self) -> None:
        """Let READs end, drop every peer, then the transport.

        Over TCP UCX 1.21 may abort a peer's process when the reader of its memory goes. A transfer
        that does not settle gets no end.
        """
        while self._is_reading():  # `poll` gives up late ones
            with suppress(TransferError):
                self.poll()
            time.sleep(_SETTLING_POLL_S)
        for key in list(self._peers):
            self._drop(key, "the agent closes")
        until = time.perf_counter() + self._timeout_s
        while self._settling and time.perf_counter() < until:
            time.sleep(_SETTLING_POLL_S)
            self._end_settled()
        if self._settling:
            logger.error("transfer agent %s closes before its device is idle", self._name)
        self._transport.close()

    def _is_reading(self) -> bool:
        return any(transfer.order.operation == "READ" for transfer in self._transfers)

    def _drop(
        self,
        key: tuple[str, int],
        reason: str,
        failed: tuple[TransferOrder, TransferError] | None = None,
    ) -> None:
        """Tear a connection down, and end its transfers and the one that `failed` to be posted."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        doomed = [each for each in self._transfers if each.order.peer.key == key]
        self._transfers = [each for each in self._transfers if each.order.peer.key != key]
        for transfer in doomed:
            self._transport.release(transfer.handle)
        self._transport.remove_peer(peer.name)
        logger.info("transfer agent %s dropped %s: %s", self._name, peer.name, reason)
        ends = [failed] if failed is not None else []
        for transfer in doomed:
            order = transfer.order
            ends.append((order, TransferError(f"{order.operation} with {peer.name}: {reason}")))

        def end() -> None:
            for order, error in ends:
                order.on_done(error)

        if ends and self._settle is not None:
            self._settling.append(_Settling(self._settle(), end))
        else:
            end()

    def _end_settled(self) -> None:
        over = [settling for settling in self._settling if settling.is_over()]
        self._settling = [settling for settling in self._settling if settling not in over]
        for settling in over:
            settling.end()

    def _connected(self, rank: PeerRank) -> _Peer:
        peer = self._peers.get(rank.key)
        if peer is None or peer.rank != rank:
            raise TransferError(f"{rank.agent_name}: not connected")
        return peer

    def _checked_peer(self, order: TransferOrder) -> _Peer:
        peer = self._connected(order.peer)
        doing = f"{order.operation} with {peer.name}"
        if not order.pairs:
            raise TransferError(f"{doing}: no blocks")
        for local, remote in order.pairs:
            if not (0 <= local < self._num_blocks and 0 <= remote < peer.grid.num_blocks):
                raise TransferError(
                    f"{doing}: block {local} of {self._num_blocks} and block {remote} of "
                    f"{peer.grid.num_blocks} are out of range"
                )
        return peer

    def _tables(self, peer: _Peer, selection: Selection) -> object:
        key = (selection.local_parts, selection.remote_parts)
        if key not in peer.tables:
            peer.tables[key] = self._transport.prepare(peer.name, *key)
        return peer.tables[key]

    def _poll_transfer(self, transfer: _Transfer, now: float) -> None:
        order = transfer.order
        try:
            done = self._transport.poll(transfer.handle)
        except TransferError as exc:
            self._drop(order.peer.key, exc.message)
            return
        if done:
            if order.operation == "WRITE":
                took_s = time.perf_counter() - transfer.posted_at
                self.longest_write_s = max(took_s, _FORGET * self.longest_write_s)
            self._transfers.remove(transfer)
            self._transport.release(transfer.handle)
            order.on_done(None)
        elif now - transfer.posted_at > self._timeout_s:
            self._drop(order.peer.key, f"a transfer took more than {self._timeout_s} s")
