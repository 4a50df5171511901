"""The NIXL transport (UCX backend). Only this module and sdk/nixl/agent.py use the library.

This module relies on these measurements of NIXL 1.5 over host memory (two processes, cross-memory
attach):

- A write's bytes are in the peer's memory when the post returns, but its completion, and so the
  notification, needs the peer to make progress (`notifications()`): a stopped peer leaves writes
  in progress until it wakes, dies (seen at once) or is removed.
- Descriptors are prepared once for every block of both pools and picked by index; the library
  merges those that are adjacent on both sides. 512 adjacent blocks of 4 KiB took 164 us by index
  (14 us of it to pick them) and 154 us as one descriptor, but 870 us when no two were adjacent.
- A failure is reported as "ERR" or as an exception; both are handled.
"""

import importlib
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.runtime.errors import TransferError
from tandem.transfer.libraries import loading, quietly, translated
from tandem.transfer.transport import BlockGrid, Indices, Operation, Parts

_WHEELS = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_BACKEND = "UCX"
_SELF = "NIXL_INIT_AGENT"  # the library's name for the local side of a prepared list


@dataclass(slots=True)
class _Peer:
    grid: BlockGrid
    tables: list["_Tables"] = field(default_factory=list)


@dataclass(slots=True)
class _Tables:
    peer: str
    local: Any  # prepared descriptors of the own pool
    remote: Any  # ... and of the peer's


class NixlTransport:
    """One NIXL agent. `name` must be unique among all agents that may ever meet."""

    def __init__(self, name: str) -> None:
        api = load_api()
        # The library's own progress thread costs most of the bandwidth on few cores.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        self._agent: Any = translated("NIXL, agent", lambda: api.nixl_agent(name, config))
        if _BACKEND not in self._agent.backends:
            raise TransferError(f"NIXL has no {_BACKEND} backend here")
        self._registered: Any = None
        self._grid: BlockGrid | None = None
        self._local: dict[Parts, Any] = {}  # prepared descriptors of the own pool
        self._peers: dict[str, _Peer] = {}

    def register(self, grid: BlockGrid) -> None:
        num_bytes = grid.num_blocks * grid.block_bytes
        region = [(grid.base_address, num_bytes, grid.device_id, "")]
        self._registered = translated(
            "NIXL, register", lambda: self._agent.register_memory(region, grid.memory)
        )
        self._grid = grid

    def metadata(self) -> bytes:
        data: bytes = translated("NIXL, metadata", self._agent.get_agent_metadata)
        return data

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        name = translated("NIXL, add peer", lambda: self._agent.add_remote_agent(metadata))
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[peer] = _Peer(grid)
        return peer

    def remove_peer(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for tables in known.tables:
            quietly(tables.remote.release)
        quietly(lambda: self._agent.remove_remote_agent(peer))

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        known = self._peers[peer]
        assert self._grid is not None, "register() comes first"
        if local_parts not in self._local:
            self._local[local_parts] = self._prepare(_SELF, self._grid, local_parts)
        remote = self._prepare(peer, known.grid, remote_parts)
        tables = _Tables(peer, self._local[local_parts], remote)
        known.tables.append(tables)
        return tables

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Indices,
        remote_indices: Indices,
        notice: bytes,
    ) -> object:
        assert isinstance(tables, _Tables)
        doing = f"NIXL, {operation} with {tables.peer}"
        handle = translated(
            doing,
            lambda: self._agent.make_prepped_xfer(
                operation,
                tables.local,
                np.asarray(local_indices, dtype=np.int32),
                tables.remote,
                np.asarray(remote_indices, dtype=np.int32),
                notice,
            ),
        )
        try:
            state = translated(doing, lambda: self._agent.transfer(handle))
            if state == "ERR":
                raise TransferError(f"{doing}: the library refused it")
        except TransferError:
            self.release(handle)
            raise
        return handle

    def poll(self, handle: object) -> bool:
        state = translated("NIXL, transfer", lambda: self._agent.check_xfer_state(handle))
        if state == "ERR":
            raise TransferError("NIXL, transfer: the library reports a failure")
        return bool(state == "DONE")

    def release(self, handle: object) -> None:
        quietly(lambda: self._agent.release_xfer_handle(handle))

    def notify(self, peer: str, notice: bytes) -> None:
        translated(f"NIXL, notify {peer}", lambda: self._agent.send_notif(peer, notice))

    def notifications(self) -> list[tuple[str, bytes]]:
        found = translated("NIXL, notifications", self._agent.get_new_notifs)
        return [(peer, notice) for peer, notices in found.items() for notice in notices]

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        for prepared in self._local.values():
            quietly(prepared.release)
        if self._registered is not None:
            quietly(lambda: self._agent.deregister_memory(self._registered))
        # The last reference: the library is torn down here, on its own thread, and not by the
        # garbage collector on another.
        self._local.clear()
        self._registered = self._agent = None

    def _prepare(self, side: str, grid: BlockGrid, parts: Parts) -> Any:
        blocks = np.arange(grid.num_blocks, dtype=np.uint64)[:, None] * np.uint64(grid.block_bytes)
        offsets, lengths = np.array(parts, dtype=np.uint64).T
        descriptors = np.empty((grid.num_blocks, len(parts), 3), dtype=np.uint64)
        descriptors[:, :, 0] = np.uint64(grid.base_address) + blocks + offsets  # address
        descriptors[:, :, 1] = lengths  # bytes
        descriptors[:, :, 2] = grid.device_id
        return translated(
            f"NIXL, prepare the blocks of {side}",
            lambda: self._agent.prep_xfer_dlist(
                side, self._agent.get_xfer_descs(descriptors.reshape(-1, 3), grid.memory)
            ),
        )


def load_api() -> Any:
    """Return the library's module, with its logging put right.

    TransferError where none is installed, or where this process has loaded ucxx.
    """
    raise_exceptions = logging.raiseExceptions
    for wheel in _WHEELS:
        try:
            with loading("NIXL"):
                api = importlib.import_module(wheel)
        except ImportError:
            continue
        # Importing it gives the logger "nixl" a handler on stdout at INFO, and turns off the
        # reporting of logging's own errors for the whole process.
        logging.raiseExceptions = raise_exceptions
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.WARNING)
        return api
    raise TransferError(f"NIXL is not installed; looked for {', '.join(_WHEELS)}")
