"""An in-process transport for tests: copies between pools of one process, with faults on demand.

A fabric connects the transports that were made on it. By default a write lands when it is posted;
with `fabric.held` set, operations wait in `fabric.pending` until the test decides on them.
"""

import ctypes
from collections import deque
from dataclasses import dataclass, field

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import BlockGrid, Indices, Operation, Parts


@dataclass(slots=True, eq=False)
class PendingTransfer:
    """A posted transfer that has not been decided yet."""

    source: "LoopbackTransport"  # that posted it
    target: str
    operation: Operation
    pieces: list[tuple[int, int, int]]  # (own offset, offset at the target, bytes)
    notice: bytes
    done: bool = False
    error: str = ""

    def copy(self, num_bytes: int | None = None) -> None:
        """Copy the bytes; with `num_bytes`, only the first ones of each piece."""
        target = self.source.fabric.transports.get(self.target)
        if target is None:
            return
        for ours, theirs, length in self.pieces:
            near = self.source.grid.base_address + ours
            far = target.grid.base_address + theirs
            to, origin = (far, near) if self.operation == "WRITE" else (near, far)
            ctypes.memmove(to, origin, length if num_bytes is None else min(length, num_bytes))

    def finish(self) -> None:
        """Complete the transfer at the sender and notify the receiver."""
        self.done = True
        target = self.source.fabric.transports.get(self.target)
        if target is not None and self.notice:
            target.inbox.append((self.source.name, self.notice))

    def fail(self, error: str) -> None:
        """Fail the transfer at the sender; nothing of it lands any more."""
        self.error = error


@dataclass(frozen=True, slots=True)
class _Tables:
    peer: str
    local_parts: Parts
    remote_parts: Parts


@dataclass(slots=True)
class LoopbackFabric:
    """Connects loopback transports; no transfer can be posted to a peer in `failing`."""

    held: bool = False
    transports: dict[str, "LoopbackTransport"] = field(default_factory=dict)
    pending: list[PendingTransfer] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)


class LoopbackTransport:
    """A Transport between the pools of one process."""

    def __init__(self, name: str, fabric: LoopbackFabric) -> None:
        self.name = name
        self.fabric = fabric
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._grid: BlockGrid | None = None
        self._peers: dict[str, BlockGrid] = {}

    @property
    def grid(self) -> BlockGrid:
        """The registered pool."""
        assert self._grid is not None, "register() comes first"
        return self._grid

    def register(self, grid: BlockGrid) -> None:
        self._grid = grid
        self.fabric.transports[self.name] = self

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        peer = metadata.decode()
        if peer not in self.fabric.transports:
            raise TransferError(f"loopback: no transport named {peer}")
        self._peers[peer] = grid
        return peer

    def remove_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        lengths = [[length for _, length in parts] for parts in (local_parts, remote_parts)]
        if lengths[0] != lengths[1]:
            raise TransferError(f"loopback: parts of {lengths[0]} and {lengths[1]} bytes")
        return _Tables(peer, local_parts, remote_parts)

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Indices,
        remote_indices: Indices,
        notice: bytes,
    ) -> object:
        assert isinstance(tables, _Tables)
        peer = tables.peer
        if peer not in self._peers or peer not in self.fabric.transports:
            raise TransferError(f"loopback: {peer} is not connected")
        if peer in self.fabric.failing:
            raise TransferError(f"loopback: a {operation} with {peer} failed")
        pieces = []
        for local, remote in zip(local_indices, remote_indices, strict=True):
            ours, length = _piece(local, tables.local_parts, self.grid)
            theirs, _ = _piece(remote, tables.remote_parts, self._peers[peer])
            pieces.append((ours, theirs, length))
        transfer = PendingTransfer(self, peer, operation, pieces, notice)
        if self.fabric.held:
            self.fabric.pending.append(transfer)
        else:
            transfer.copy()
            transfer.finish()
        return transfer

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, PendingTransfer)
        if handle.error:
            raise TransferError(f"loopback: {handle.error}")
        return handle.done

    def release(self, handle: object) -> None:
        assert isinstance(handle, PendingTransfer)

    def notify(self, peer: str, notice: bytes) -> None:
        target = self.fabric.transports.get(peer)
        if target is None or peer not in self._peers:
            raise TransferError(f"loopback: {peer} is not connected")
        target.inbox.append((self.name, notice))

    def notifications(self) -> list[tuple[str, bytes]]:
        found = []
        while self.inbox:
            found.append(self.inbox.popleft())
        return found

    def close(self) -> None:
        self.fabric.transports.pop(self.name, None)
        self._peers.clear()


def _piece(index: int, parts: Parts, grid: BlockGrid) -> tuple[int, int]:
    """Return the offset of a part in its pool, and its length."""
    block_id, part = divmod(int(index), len(parts))
    offset, length = parts[part]
    return block_id * grid.block_bytes + offset, length


PROCESS_FABRIC = LoopbackFabric()
