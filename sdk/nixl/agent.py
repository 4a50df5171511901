"""A NIXL agent with the names that its own Python package gives, for code that is brought along.

What differs from that package: descriptor lists are bytes of packed integers that may cross a wire
as they are; a failure is a TransferError, never a status that nobody looks at; every call may come
from any thread; and a posted transfer goes on to its end, and notifies, when its handle is dropped.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from tandem.runtime.errors import InvalidRequestError, TransferError
from tandem.sdk.nixl.descriptors import pack, unpack
from tandem.sdk.nixl.handles import (
    Held,
    PreparedList,
    RegisteredMemory,
    State,
    TransferHandle,
    nixl_agent_config,
)
from tandem.sdk.nixl.memory import check_memory
from tandem.sdk.nixl.pieces import Regions, check_pairs, picked, pieces_of
from tandem.transfer.nixl import load_api, quietly, translated
from tandem.transfer.transport import Indices

POLL_S = 0.0005  # the library only lets its transfers be asked

logger = logging.getLogger(__name__)


class nixl_agent:
    """`agent_name` must be unique among all agents that may ever meet. Owner of all it hands out.

    Bad arguments are InvalidRequestErrors that name the argument, what a peer sent and can't be
    read is a ProtocolError, and every failure of the library is a TransferError.
    """

    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = None) -> None:
        api = load_api()
        config = nixl_conf or nixl_agent_config()
        theirs = api.nixl_agent_config(enable_prog_thread=False, backends=list(config.backends))
        self.name = agent_name
        self._library: Any = translated("agent", lambda: api.nixl_agent(agent_name, theirs))
        if missing := sorted(set(config.backends) - set(self._library.backends)):
            raise TransferError(f"NIXL has no backend {', '.join(missing)} here")
        self._held = Held()
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
        """Regions of this process's memory; `mem_type` is "DRAM" or "VRAM", and known of tensors.

        Refused when the memory is not of that kind: a tensor on the host is no "VRAM".
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
        theirs = self._call("register", lambda it: it.register_memory(given.regions, given.memory))
        self._held.memory.append((descs, theirs))
        return descs

    def deregister_memory(self, dereg_list: RegisteredMemory) -> None:
        """What register_memory() gave back; anything else is left alone."""
        for entry in [entry for entry in self._held.memory if entry[0] is dereg_list]:
            self._held.memory.remove(entry)
            self._deregister(entry[1])

    def get_xfer_descs(self, descs: Regions, mem_type: str | None = None) -> bytes:
        """The pieces that transfers pick from, for this side and, sent over a wire, for a peer."""
        return pack(pieces_of(descs, mem_type))

    def prep_xfer_dlist(self, agent_name: str, xfer_list: bytes) -> PreparedList:
        """`agent_name` is a peer's, or "" for this side; `xfer_list` is from get_xfer_descs()."""
        pieces = unpack(xfer_list)
        side = "" if agent_name == "NIXL_INIT_AGENT" else agent_name
        if side and side not in self._held.peers:
            raise InvalidRequestError(f"agent_name: {side!r} was not added", param="agent_name")
        handle = self._call(
            f"prepare the blocks of {side or 'this side'}",
            lambda it: it.prep_xfer_dlist(side, it.get_xfer_descs(pieces.table, pieces.memory)),
        )
        prepared = PreparedList(side, pieces.table[:, 1].copy(), handle)
        self._held.lists.append(prepared)
        return prepared

    def release_dlist_handle(self, handle: PreparedList) -> None:
        """No transfer of the list may be under way."""
        with self._turn:
            if handle in self._held.lists:
                self._held.lists.remove(handle)
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
        """Piece `local_indices[i]` to ("WRITE") or from ("READ") piece `remote_indices[i]`.

        The peer gets `notif_msg` when all of it is done. transfer() begins it.
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
        """Begin it; with memory of the host, the call may take as long as the copy does."""
        with self._turn:
            if handle in self._held.under_way:
                raise InvalidRequestError("handle: its transfer is under way", param="handle")
            handle.state, handle.error = "PROC", None
            self._held.under_way.append(handle)
            self._settle(handle, lambda it: it.transfer(handle.handle))
            return self._told(handle)

    def check_xfer_state(self, handle: TransferHandle) -> State:
        """ "DONE" once the transfer is complete at both ends; TransferError when it failed."""
        with self._turn:
            if handle.state == "NEW":
                raise InvalidRequestError("handle: transfer() comes first", param="handle")
            if handle in self._held.under_way:
                self._ask(handle)
            return self._told(handle)

    def release_xfer_handle(self, handle: TransferHandle) -> None:
        """One that is under way is given up: what it moves may or may not arrive."""
        with self._turn:
            if handle in self._held.under_way:
                self._held.under_way.remove(handle)
                handle.error = TransferError(f"{handle.doing}: given up")
            quietly(handle.handle.release)

    def get_agent_metadata(self) -> bytes:
        """What a peer needs to reach the memory registered so far."""
        metadata: bytes = self._call("metadata", lambda it: it.get_agent_metadata())
        return metadata

    def add_remote_agent(self, metadata: bytes) -> str:
        """The peer's name."""
        name = self._call("add peer", lambda it: it.add_remote_agent(metadata))
        peer = name.decode() if isinstance(name, bytes) else str(name)
        if peer not in self._held.peers:
            self._held.peers.append(peer)
        return peer

    def remove_remote_agent(self, agent: str) -> None:
        """Disconnect; what is under way with that peer is given up first."""
        with self._turn:
            if agent not in self._held.peers:
                return
            for handle in [each for each in self._held.under_way if each.peer == agent]:
                self.release_xfer_handle(handle)
            for prepared in [each for each in self._held.lists if each.side == agent]:
                self.release_dlist_handle(prepared)
            self._held.peers.remove(agent)
            quietly(lambda: self._library.remove_remote_agent(agent))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Agent's name |-> messages that came from it since the last call."""
        with self._turn:
            self._collect()
            messages, self._messages = self._messages, {}
        return messages

    def send_notif(self, remote_agent_name: str, notif_msg: bytes | str) -> None:
        """A message that belongs to no transfer."""
        message = as_bytes(notif_msg)
        self._call("send", lambda it: it.send_notif(remote_agent_name, message))

    def close(self) -> None:
        """Give everything back, in the order that the library wants. May be called again."""
        with self._turn:
            if self._library is None:
                return
            for peer in list(self._held.peers):
                self.remove_remote_agent(peer)
            for prepared in list(self._held.lists):
                self.release_dlist_handle(prepared)
            for _, theirs in self._held.memory:
                quietly(partial(self._deregister, theirs))
            self._held.memory.clear()
            self._library = None
        if self._progress is not None:
            self._progress.join()

    def step(self) -> bool:
        """One turn of the progress thread; False when the agent is closed."""
        with self._turn:
            if self._library is None:
                return False
            try:
                self._collect()
            except TransferError as error:
                logger.warning("%s: %s", self.name, error)
            return True

    def _collect(self) -> None:
        """Messages that came, and ends of transfers: the library tells both only when asked."""
        found = self._call("messages", lambda it: it.get_new_notifs())
        for name, messages in found.items():
            sender = name.decode() if isinstance(name, bytes) else name
            self._messages.setdefault(sender, []).extend(messages)
        for handle in list(self._held.under_way):
            self._ask(handle)
            if handle.error is not None:
                logger.warning("%s", handle.error)

    def _call(self, doing: str, call: Callable[[Any], Any]) -> Any:
        with self._turn:
            library = self._library
            if library is None:
                raise TransferError(f"NIXL, {doing}: the agent {self.name} is closed")
            return translated(doing, lambda: call(library))

    def _deregister(self, theirs: Any) -> None:
        self._call("deregister", lambda it: it.deregister_memory(theirs))

    def _ask(self, handle: TransferHandle) -> None:
        self._settle(handle, lambda it: it.check_xfer_state(handle.handle))

    def _settle(self, handle: TransferHandle, ask: Callable[[Any], Any]) -> None:
        """A failure comes as "ERR" or as an exception; both are kept with the handle."""
        try:
            state = self._call(handle.doing, ask)
            if state == "ERR":
                raise TransferError(f"{handle.doing}: the library reports a failure")
        except TransferError as error:
            handle.error = error
            state = "ERR"
        if state != "PROC":
            handle.state = "DONE"
            self._held.under_way.remove(handle)

    def _told(self, handle: TransferHandle) -> State:
        if handle.error is not None:
            raise handle.error
        return "DONE" if handle.state == "DONE" else "PROC"


def _progress(mine: "weakref.ref[nixl_agent]") -> None:
    """Until the agent is closed, or gone."""
    while (agent := mine()) is not None and agent.step():
        del agent
        time.sleep(POLL_S)


def as_bytes(message: bytes | str) -> bytes:
    """A notification as it is sent."""
    return message.encode() if isinstance(message, str) else message


_open_agents: "weakref.WeakSet[nixl_agent]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """While the interpreter is whole: a transfer's end must not be awaited after that."""
    for agent in list(_open_agents):
        agent.close()
