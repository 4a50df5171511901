"""The transport's in-process twin: copies between pools of one process, with programmable faults.

A fabric connects the transports that were made on it. By default a write lands when it is posted;
with `fabric.held` set, operations wait in `fabric.pending` and the test decides what happens.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.runtime.errors import TransferError
from tandem.transfer.layout import Run, merge_adjacent
from tandem.transfer.transport import BlockGrid


@dataclass(slots=True, eq=False)
class PendingWrite:
    """A posted write that has not been decided yet."""

    source: "LoopbackTransport"
    target: str
    pairs: list[tuple[int, int]]  # (local block, remote block)
    notice: bytes
    done: bool = False
    error: str = ""

    def copy(self, num_bytes: int | None = None) -> None:
        """Put the bytes into the target's memory; with `num_bytes`, each block's first ones."""
        target = self.source.fabric.transports.get(self.target)
        if target is None:
            return
        ours, theirs = self.source.grid, target.grid
        size = ours.block_bytes
        runs = merge_adjacent(self.pairs)
        if num_bytes is not None:
            runs = [Run(local, remote, 1) for local, remote in self.pairs]
        for run in runs:
            ctypes.memmove(
                theirs.base_address + run.remote_block * size,
                ours.base_address + run.local_block * size,
                run.count * size if num_bytes is None else num_bytes,
            )

    def finish(self) -> None:
        """Complete it towards the sender and notify the receiver."""
        self.done = True
        target = self.source.fabric.transports.get(self.target)
        if target is not None:
            target.inbox.append((self.source.name, self.notice))

    def fail(self, error: str) -> None:
        """It will not land any more, and the sender hears so."""
        self.error = error


@dataclass(slots=True)
class LoopbackFabric:
    """What connects loopback transports; `failing` names peers whose writes fail at the post."""

    held: bool = False
    transports: dict[str, "LoopbackTransport"] = field(default_factory=dict)
    pending: list[PendingWrite] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)


class LoopbackTransport:
    """A Transport between the pools of one process."""

    def __init__(self, name: str, fabric: LoopbackFabric) -> None:
        self.name = name
        self.fabric = fabric
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._grid: BlockGrid | None = None
        self._peers: set[str] = set()

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
        if grid.block_bytes != self.grid.block_bytes:
            raise TransferError(f"loopback: blocks of {peer} are {grid.block_bytes} bytes")
        self._peers.add(peer)
        return peer

    def remove_peer(self, peer: str) -> None:
        self._peers.discard(peer)

    def post_write(
        self, peer: str, local_blocks: Sequence[int], remote_blocks: Sequence[int], notice: bytes
    ) -> object:
        if peer not in self._peers or peer not in self.fabric.transports:
            raise TransferError(f"loopback: {peer} is not connected")
        if peer in self.fabric.failing:
            raise TransferError(f"loopback: a write to {peer} failed")
        pairs = list(zip(local_blocks, remote_blocks, strict=True))
        write = PendingWrite(self, peer, pairs, notice)
        if self.fabric.held:
            self.fabric.pending.append(write)
        else:
            write.copy()
            write.finish()
        return write

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, PendingWrite)
        if handle.error:
            raise TransferError(f"loopback: {handle.error}")
        return handle.done

    def release(self, handle: object) -> None:
        assert isinstance(handle, PendingWrite)

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


PROCESS_FABRIC = LoopbackFabric()
