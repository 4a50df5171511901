"""Transfers of KV blocks between engines with their own KV cache.

`NixlConnector` registers the cache of one rank and moves blocks by their ids. It uses `nixl_agent`,
which is for code that already calls NIXL.
"""

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.runtime.address import new_id
from tandem.runtime.errors import InvalidRequestError, ProtocolError
from tandem.sdk.nixl.agent import POLL_S, nixl_agent
from tandem.sdk.nixl.handles import PreparedList, State, TransferHandle, nixl_agent_config
from tandem.sdk.nixl.pieces import KvCache, caches_of, picked, tensor_memory, tensor_row
from tandem.transfer.transport import Indices


class BlockTransfer:
    """A write or read of blocks: await it, or poll `done()`. It continues when it is dropped."""

    def __init__(self, agent: nixl_agent, handle: TransferHandle) -> None:
        self._agent = agent
        self._handle = handle

    @property
    def state(self) -> State:
        """ "PROC" or "DONE". Raise TransferError after a failure."""
        return self._agent.check_xfer_state(self._handle)

    def done(self) -> bool:
        """Return True once it is complete at both ends. Raise TransferError after a failure."""
        return self.state == "DONE"

    def cancel(self) -> None:
        """Give it up. Its bytes and its notification may or may not arrive."""
        self._agent.release_xfer_handle(self._handle)

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        while not self.done():
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True, eq=False)
class _Remote:
    agent_name: str
    blocks: PreparedList
    num_blocks: int


class NixlConnector:
    """The transfers of one rank of an engine. Calls may come from any thread.

    Blocks have the ids 0 to num_blocks - 1 and are moved whole, in all registered tensors at once.
    """

    def __init__(self, engine_id: str, rank: int = 0, *, progress_thread: bool = True) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.block_len = 0  # bytes of a block, over all tensors
        self.num_blocks = 0
        config = nixl_agent_config(enable_prog_thread=progress_thread)
        self._agent = nixl_agent(f"{engine_id}.{rank}.{new_id()}", config)
        self._caches: list[KvCache] = []  # kept alive
        self._lengths: NDArray[np.uint64] = np.empty(0, np.uint64)  # [num_tensors], of a block
        self._descs = b""
        self._local: PreparedList | None = None
        self._remotes: dict[str, _Remote] = {}

    @property
    def agent_name(self) -> str:
        """The name of this connector in its notifications: `engine_id.rank.` and a number."""
        return self._agent.name

    def register_kv_caches(self, kv_caches: "KvCache | Sequence[KvCache]") -> None:
        """Open [num_blocks, ...] to peers: one tensor, or several (of layers, of K and of V).

        Contiguous torch tensors or numpy arrays, all on one device. Once per connector, which keeps
        them alive; their memory must not be reused before close().
        """
        if self._local is not None:
            raise InvalidRequestError("kv_caches: already registered", param="kv_caches")
        caches = caches_of(kv_caches)
        num_blocks = _num_blocks(caches)
        rows = [tensor_row(index, cache) for index, cache in enumerate(caches)]
        memory = tensor_memory(caches)
        pieces = [
            (address + block_id * (size // num_blocks), size // num_blocks, device)
            for address, size, device in rows
            for block_id in range(num_blocks)
        ]
        self._agent.register_memory(rows, memory)
        self._descs = self._agent.get_xfer_descs(pieces, memory)
        self._local = self._agent.prep_xfer_dlist("", self._descs)
        self._lengths = np.array([size // num_blocks for _, size, _ in rows], np.uint64)
        self._caches = caches
        self.num_blocks = num_blocks
        self.block_len = int(self._lengths.sum())

    def get_agent_metadata(self) -> tuple[bytes, bytes]:
        """Return (metadata, block descriptors) for a peer's add_remote_agent()."""
        self._registered()
        return self._agent.get_agent_metadata(), self._descs

    def add_remote_agent(
        self, engine_id: str, agent_metadata: bytes, remote_blocks_descs: bytes
    ) -> str:
        """Connect to a peer and return its agent name. Replace an engine of the same id.

        Raise ProtocolError when the peer's blocks differ in layout from the local ones.
        """
        self._registered()
        self.remove_remote_agent(engine_id)
        agent_name = self._agent.add_remote_agent(agent_metadata)
        try:
            blocks = self._agent.prep_xfer_dlist(agent_name, remote_blocks_descs)
            num_blocks = self._num_remote_blocks(engine_id, blocks.lengths)
        except BaseException:
            self._agent.remove_remote_agent(agent_name)
            raise
        self._remotes[engine_id] = _Remote(agent_name, blocks, num_blocks)
        return agent_name

    def remove_remote_agent(self, engine_id: str) -> None:
        """Disconnect; transfers with that engine fail. Do nothing for an unknown engine."""
        remote = self._remotes.pop(engine_id, None)
        if remote is not None:
            self._agent.remove_remote_agent(remote.agent_name)

    def write_blocks(
        self,
        local_block_ids: Indices,
        remote_block_ids: Indices,
        notify_msg: bytes | str = b"",
        *,
        engine_id: str | None = None,
    ) -> BlockTransfer:
        """Begin to write block `local_block_ids[i]` over the peer's block `remote_block_ids[i]`.

        The peer gets `notify_msg` after the data. `engine_id` may be left out when there is only
        one peer. With host memory, the call may take as long as the copy.
        """
        return self._begin("WRITE", local_block_ids, remote_block_ids, notify_msg, engine_id)

    def read_blocks(
        self,
        local_block_ids: Indices,
        remote_block_ids: Indices,
        notify_msg: bytes | str = b"",
        *,
        engine_id: str | None = None,
    ) -> BlockTransfer:
        """Begin to read blocks of the peer; it gets `notify_msg` after they were read."""
        return self._begin("READ", local_block_ids, remote_block_ids, notify_msg, engine_id)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return agent name |-> its messages since the last call."""
        return self._agent.get_new_notifs()

    def send_notif(self, notify_msg: bytes | str, *, engine_id: str | None = None) -> None:
        """Send a message that belongs to no transfer."""
        self._agent.send_notif(self._remote(engine_id).agent_name, notify_msg)

    def close(self) -> None:
        """Give up all transfers, disconnect, and close the memory to peers."""
        self._agent.close()
        self._remotes.clear()
        self._caches = []

    def __enter__(self) -> "NixlConnector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self,
        operation: str,
        local_block_ids: Indices,
        remote_block_ids: Indices,
        notify_msg: bytes | str,
        engine_id: str | None,
    ) -> BlockTransfer:
        remote = self._remote(engine_id)
        local = self._indices("local_block_ids", local_block_ids, self.num_blocks)
        far = self._indices("remote_block_ids", remote_block_ids, remote.num_blocks)
        if len(local) != len(far):
            raise InvalidRequestError(
                f"remote_block_ids: {len(remote_block_ids)} blocks for {len(local_block_ids)}"
                " of this side",
                param="remote_block_ids",
            )
        handle = self._agent.make_prepped_xfer(
            operation, self._registered(), local, remote.blocks, far, notify_msg
        )
        self._agent.transfer(handle)
        return BlockTransfer(self._agent, handle)

    def _indices(self, name: str, block_ids: Indices, num_blocks: int) -> NDArray[np.int32]:
        """Return the pieces of the blocks, by tensor: `tensor * num_blocks + block_id`."""
        tensors = np.arange(len(self._lengths), dtype=np.int32)[:, None] * num_blocks
        indices: NDArray[np.int32] = (tensors + picked(name, block_ids, num_blocks)).ravel()
        return indices

    def _remote(self, engine_id: str | None) -> _Remote:
        if engine_id is None and len(self._remotes) == 1:
            return next(iter(self._remotes.values()))
        if engine_id is None:
            raise InvalidRequestError(
                f"engine_id: required, because there are {len(self._remotes)} peers",
                param="engine_id",
            )
        if engine_id not in self._remotes:
            raise InvalidRequestError(f"engine_id: {engine_id!r} was not added", param="engine_id")
        return self._remotes[engine_id]

    def _registered(self) -> PreparedList:
        if self._local is None:
            raise InvalidRequestError("register_kv_caches() comes first", param="kv_caches")
        return self._local

    def _num_remote_blocks(self, engine_id: str, lengths: NDArray[np.uint64]) -> int:
        """Return the peer's number of blocks. `lengths`: [num_tensors * num_blocks], its pieces."""
        num_blocks, rest = divmod(len(lengths), len(self._lengths))
        if rest or (lengths.reshape(-1, num_blocks) != self._lengths[:, None]).any():
            raise ProtocolError(
                f"{engine_id}: its {len(lengths)} pieces, the first of {lengths[0]} bytes, are not"
                f" blocks of {len(self._lengths)} tensors of {self._lengths.tolist()} bytes each"
            )
        return num_blocks


def _num_blocks(caches: Sequence[KvCache]) -> int:
    if not caches:
        raise InvalidRequestError("kv_caches: must not be empty", param="kv_caches")
    counts = {len(cache) if cache.ndim else 0 for cache in caches}
    if len(counts) > 1 or 0 in counts:
        raise InvalidRequestError(
            f"kv_caches: tensors of {sorted(counts)} blocks; the first dimension of each is the"
            " number of blocks, the same for all",
            param="kv_caches",
        )
    return counts.pop()
