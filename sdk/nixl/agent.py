"""A NIXL agent with the names of NIXL's own Python package, for existing code.

The differences: descriptor lists are bytes of packed integers that may cross a wire; a failure is
a TransferError, never a status; every call may come from any thread; and a posted transfer runs to
its end, and notifies, when its handle is dropped.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError, TransferError
from tandem.runtime.process.names import variable_name
from tandem.sdk.nixl.descriptors import pack, unpack
from tandem.sdk.nixl.handles import (
    PreparedList,
    RegisteredMemory,
    State,
    TransferHandle,
    nixl_agent_config,
)
from tandem.sdk.nixl.memory import check_memory
from tandem.sdk.nixl.pieces import Regions, check_pairs, picked, pieces_of
from tandem.transfer.cuda_context import ensure_cuda_context
from tandem.transfer.libraries import quietly, translated
from tandem.transfer.network_devices import confine_ucx
from tandem.transfer.nixl import load_api
from tandem.transfer.transport import Indices

POLL_S = 0.0005  # transfers of the library can only be polled

logger = logging.getLogger(__name__)


class nixl_agent:
    """An agent, and the owner of all that it returns. `agent_name` is unique among all agents.

    Wrong arguments raise InvalidRequestError naming the argument, unreadable data of a peer raises
    ProtocolError, and a failure of the library TransferError.
    """

    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = None) -> None:
        # A DistributedRuntime with a config of its own, made before, has done this already.
        confine_ucx(os.environ.get(variable_name("runtime.host")) or RuntimeConfig().host)
        api = load_api()
        config = nixl_conf or nixl_agent_config()
        theirs = api.nixl_agent_config(enable_prog_thread=False, backends=list(config.backends))
        self.name = agent_name
        self._library: Any = translated("NIXL, agent", lambda: api.nixl_agent(agent_name, theirs))
        if missing := sorted(set(config.backends) - set(self._library.backends)):
            raise TransferError(f"NIXL has no backend {', '.join(missing)} here")
        # Released before the agent:
        self._memory: list[tuple[RegisteredMemory, Any]] = []
        self._lists: list[PreparedList] = []
        self._peers: list[str] = []
        self._under_way: list[TransferHandle] = []
        self._device_id: int | None = None  # of the first registered memory on a GPU
        self._messages: dict[str, list[bytes]] = {}
        self._turn = threading.RLock()  # the library has no lock of its own
        self._progress: threading.Thread | None = None
        if config.enable_prog_thread:
            name, mine = f"nixl-{agent_name}", weakref.ref(self)
            self._progress = threading.Thread(
                target=_progress, args=(mine,), name=name, daemon=True
            )
            self._progress.start()
        _open_agents.add(self)

    def get_reg_descs(self, descs: Regions, mem_type: str | None = None) -> RegisteredMemory:
        """Return regions of this process's memory; `mem_type` "DRAM" or "VRAM", implied by tensors.

        Raise InvalidRequestError when the memory is of the other kind.
        """
        pieces = pieces_of(descs, mem_type)
        check_memory(pieces.memory, pieces.table[:, 0].tolist())
        rows = pieces.table.tolist()
        return RegisteredMemory(pieces.memory, [(a, size, device, "") for a, size, device in rows])

    def register_memory(
        self, reg_list: "RegisteredMemory | Regions", mem_type: str | None = None
    ) -> RegisteredMemory:
        """Open memory to peers. It must stay allocated until deregister_memory() or close()."""
        descs = reg_list
        if not isinstance(descs, RegisteredMemory):
            descs = self.get_reg_descs(descs, mem_type)
        given = descs
        if given.memory == "VRAM" and self._device_id is None:
            self._device_id = given.regions[0][2]
        theirs = self._call("register", lambda it: it.register_memory(given.regions, given.memory))
        self._memory.append((descs, theirs))
        return descs

    def deregister_memory(self, dereg_list: RegisteredMemory) -> None:
        """Undo register_memory(). Do nothing for anything else."""
        for entry in [entry for entry in self._memory if entry[0] is dereg_list]:
            self._memory.remove(entry)
            self._deregister(entry[1])

    def get_xfer_descs(self, descs: Regions, mem_type: str | None = None) -> bytes:
        """Return the pieces that transfers pick from, for this side and for a peer."""
        return pack(pieces_of(descs, mem_type))

    def prep_xfer_dlist(self, agent_name: str, xfer_list: bytes) -> PreparedList:
        """Prepare pieces of get_xfer_descs() of a peer, or of this side with `agent_name` ""."""
        pieces = unpack(xfer_list)
        side = "" if agent_name == "NIXL_INIT_AGENT" else agent_name
        if side and side not in self._peers:
            raise InvalidRequestError(f"agent_name: {side!r} was not added", param="agent_name")
        handle = self._call(
            f"prepare the blocks of {side or 'this side'}",
            lambda it: it.prep_xfer_dlist(side, it.get_xfer_descs(pieces.table, pieces.memory)),
        )
        prepared = PreparedList(side, pieces.table[:, 1].copy(), handle)
        self._lists.append(prepared)
        return prepared

    def release_dlist_handle(self, handle: PreparedList) -> None:
        """Release a list; no transfer of it may be under way."""
        with self._turn:
            if handle in self._lists:
                self._lists.remove(handle)
                quietly(handle.handle.release)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: PreparedList,
        local_indices: Indices,
        remote_xfer_side: PreparedList,
        remote_indices: Indices,
        notif_msg: bytes | str = b"",
    ) -> TransferHandle:
        """Return a transfer of piece `local_indices[i]` to or from piece `remote_indices[i]`.

        The operation is "WRITE" (to the peer) or "READ". The peer gets `notif_msg` at the end.
        transfer() begins it.
        """
        if operation not in ("WRITE", "READ"):
            raise InvalidRequestError(
                f"operation: {operation!r} is not 'WRITE' or 'READ'", param="operation"
            )
        near, far = local_xfer_side, remote_xfer_side
        local = picked("local_indices", local_indices, len(near.lengths))
        remote = picked("remote_indices", remote_indices, len(far.lengths))
        check_pairs(near.lengths[local], far.lengths[remote])
        notice = as_bytes(notif_msg)
        doing = f"{operation} with {far.side}"
        handle = self._call(
            doing,
            lambda it: it.make_prepped_xfer(
                operation, near.handle, local, far.handle, remote, notice
            ),
        )
        return TransferHandle(doing, far.side, handle)

    def transfer(self, handle: TransferHandle) -> State:
        """Begin a transfer. With host memory, the call may take as long as the copy."""
        with self._turn:
            if handle in self._under_way:
                raise InvalidRequestError("handle: its transfer is under way", param="handle")
            handle.state, handle.error = "PROC", None
            self._under_way.append(handle)
            self._settle(handle, lambda it: it.transfer(handle.handle))
            return self._result(handle)

    def check_xfer_state(self, handle: TransferHandle) -> State:
        """Return "DONE" once it is complete at both ends. Raise TransferError after a failure."""
        with self._turn:
            if handle.state == "NEW":
                raise InvalidRequestError("handle: transfer() comes first", param="handle")
            if handle in self._under_way:
                self._ask(handle)
            return self._result(handle)

    def release_xfer_handle(self, handle: TransferHandle) -> None:
        """Release a transfer. If it is under way, its data may or may not arrive."""
        with self._turn:
            if handle in self._under_way:
                self._under_way.remove(handle)
                handle.error = TransferError(f"{handle.doing}: given up")
            quietly(handle.handle.release)

    def get_agent_metadata(self) -> bytes:
        """Return the metadata by which a peer reaches the memory registered so far."""
        metadata: bytes = self._call("metadata", lambda it: it.get_agent_metadata())
        return metadata

    def add_remote_agent(self, metadata: bytes) -> str:
        """Connect to a peer and return its name."""
        name = self._call("add peer", lambda it: it.add_remote_agent(metadata))
        peer = name.decode() if isinstance(name, bytes) else str(name)
        if peer not in self._peers:
            self._peers.append(peer)
        return peer

    def remove_remote_agent(self, agent: str) -> None:
        """Give up all transfers with a peer and disconnect."""
        with self._turn:
            if agent not in self._peers:
                return
            for handle in [each for each in self._under_way if each.peer == agent]:
                self.release_xfer_handle(handle)
            for prepared in [each for each in self._lists if each.side == agent]:
                self.release_dlist_handle(prepared)
            self._peers.remove(agent)
            quietly(lambda: self._library.remove_remote_agent(agent))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return agent name |-> its messages since the last call."""
        with self._turn:
            self._collect()
            messages, self._messages = self._messages, {}
        return messages

    def send_notif(self, remote_agent_name: str, notif_msg: bytes | str) -> None:
        """Send a message that belongs to no transfer."""
        message = as_bytes(notif_msg)
        self._call("send", lambda it: it.send_notif(remote_agent_name, message))

    def close(self) -> None:
        """Release everything, in the order that the library needs. Idempotent."""
        with self._turn:
            if self._library is None:
                return
            for peer in list(self._peers):
                self.remove_remote_agent(peer)
            for prepared in list(self._lists):
                self.release_dlist_handle(prepared)
            for _, theirs in self._memory:
                quietly(partial(self._deregister, theirs))
            self._memory.clear()
            self._library = None
        if self._progress is not None:
            self._progress.join()

    def step(self) -> bool:
        """Make one turn of the progress thread. Return False when the agent is closed."""
        with self._turn:
            if self._library is None:
                return False
            try:
                self._collect()
            except TransferError as error:
                logger.warning("%s: %s", self.name, error)
            return True

    def _collect(self) -> None:
        """Poll the library for messages and for ends of transfers."""
        found = self._call("messages", lambda it: it.get_new_notifs())
        for name, messages in found.items():
            sender = name.decode() if isinstance(name, bytes) else name
            self._messages.setdefault(sender, []).extend(messages)
        for handle in list(self._under_way):
            self._ask(handle)
            if handle.error is not None:
                logger.warning("%s", handle.error)

    def _call(self, doing: str, call: Callable[[Any], Any]) -> Any:
        with self._turn:
            library = self._library
            if library is None:
                raise TransferError(f"NIXL, {doing}: the agent {self.name} is closed")
            if self._device_id is not None:
                ensure_cuda_context(self._device_id)
            return translated(f"NIXL, {doing}", lambda: call(library))

    def _deregister(self, theirs: Any) -> None:
        self._call("deregister", lambda it: it.deregister_memory(theirs))

    def _ask(self, handle: TransferHandle) -> None:
        self._settle(handle, lambda it: it.check_xfer_state(handle.handle))

    def _settle(self, handle: TransferHandle, ask: Callable[[Any], Any]) -> None:
        """Update the handle's state; keep a failure, "ERR" or an exception, as its `error`."""
        try:
            state = self._call(handle.doing, ask)
            if state == "ERR":
                raise TransferError(f"{handle.doing}: the library reports a failure")
        except TransferError as error:
            handle.error = error
            state = "ERR"
        if state != "PROC":
            handle.state = "DONE"
            self._under_way.remove(handle)

    def _result(self, handle: TransferHandle) -> State:
        if handle.error is not None:
            raise handle.error
        return "DONE" if handle.state == "DONE" else "PROC"


def _progress(mine: "weakref.ref[nixl_agent]") -> None:
    """Poll until the agent is closed or collected."""
    while (agent := mine()) is not None and agent.step():
        del agent
        time.sleep(POLL_S)


def as_bytes(message: bytes | str) -> bytes:
    """Return a notification as bytes."""
    return message.encode() if isinstance(message, str) else message


_open_agents: "weakref.WeakSet[nixl_agent]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all agents before the interpreter ends: later a transfer would never finish."""
    for agent in list(_open_agents):
        agent.close()
