"""One end of a measured transfer: a KV pool, our agents and the bare library over the same memory.

Both prepare the same descriptors and move the same blocks: the difference is the agents' cost.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import msgspec
import numpy as np
import torch

from tandem.bench.engine.setting import QWEN3_8B
from tandem.engine.core.loop import SWITCH_INTERVAL_S
from tandem.engine.memory.kv_cache import KvCache
from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tandem.transfer.network_devices import confine_ucx
from tandem.transfer.nixl import load_api
from tandem.transfer.transport import KvMemory

DEADLINE_S = 30.0  # of one transfer or message
_BACKEND = "UCX"
_FILL_BYTES = 64 << 20


class PoolShape(msgspec.Struct, frozen=True):
    """The shape of a pool."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def block_bytes(self) -> int:
        item_bytes = int(getattr(torch, self.dtype).itemsize)
        return (
            self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * item_bytes
        )


class BareMetadata(msgspec.Struct, frozen=True):
    """The address of one end's bare library for the other."""

    agent: bytes
    base_address: int


class End:
    """A pool of random bytes with agents that serve it. Close it by leaving."""

    def __init__(self, shape: PoolShape, name: str) -> None:
        self.shape = shape
        self.name = name
        model = replace(
            QWEN3_8B,
            num_layers=shape.num_layers,
            num_heads=shape.num_kv_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )
        device = torch.device(shape.device)
        self.kv = KvCache(model, shape.num_blocks, shape.block_size, device)
        raw = self.kv.tensor.view(-1).view(torch.uint8)
        for start in range(0, len(raw), _FILL_BYTES):
            raw[start : start + _FILL_BYTES].random_(0, 256)
        layout = KvLayout.of(self.kv.tensor, shape.num_kv_heads)
        self.group: TransferGroup = TransferGroup(TransferConfig(), layout, [self.kv], name, "1")
        self.bare: BareLibrary | None = None

    async def start(self, on_notification: Callable[[bytes], None]) -> Self:
        """Start the agents; `on_notification` gets their messages."""
        # As in every worker:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        confine_ucx("127.0.0.1")
        await self.group.start(lambda _rank, data: on_notification(data))
        self.bare = BareLibrary(f"{self.name}.bare", self.kv)
        return self

    async def close(self) -> None:
        if self.bare is not None:
            self.bare.close()
        await self.group.close()

    def metadata(self) -> tuple[TransferMetadata, BareMetadata]:
        """Return the metadata for the other end; complete after `start`."""
        assert self.bare is not None
        return self.group.metadata(), self.bare.metadata()

    @contextlib.contextmanager
    def answering(
        self, message: bytes, peer: str, on_message: Callable[[], bool]
    ) -> Iterator[None]:
        """Send `message` back to `peer` from within the agent's poll loop while the body runs.

        `on_message` is called there for each; the message is sent back if it returns True.
        """
        reactor = self.group._first._reactor
        assert reactor is not None
        poll = reactor.poll

        def answer() -> list[bytes]:
            notices = poll()
            for notice in notices:
                if notice == message and on_message():
                    reactor.notify(peer, message)
            return notices

        reactor.poll = answer  # type: ignore[method-assign]
        try:
            yield
        finally:
            reactor.poll = poll  # type: ignore[method-assign]


class BareLibrary:
    """NIXL as its own examples use it: one thread that polls, with short pauses or none."""

    def __init__(self, name: str, kv: KvMemory) -> None:
        api = load_api()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        self._agent: Any = api.nixl_agent(name, config)
        self._kv = kv
        region = [(kv.base_address, len(kv.tensor) * kv.block_bytes, kv.device_id, "")]
        self._registered = self._agent.register_memory(region, kv.memory)
        self._local = self._prepare("NIXL_INIT_AGENT", kv.base_address)
        self._remote: Any = None
        self._peer = ""

    def metadata(self) -> BareMetadata:
        return BareMetadata(self._agent.get_agent_metadata(), self._kv.base_address)

    def connect(self, peer: BareMetadata) -> None:
        """Make the other end reachable; its pool must have the shape of ours."""
        name = self._agent.add_remote_agent(peer.agent)
        self._peer = name.decode() if isinstance(name, bytes) else str(name)
        self._remote = self._prepare(self._peer, peer.base_address)
        self._agent.send_notif(self._peer, b"hello")

    def write(self, pairs: Sequence[tuple[int, int]], pause_s: float = 0.0) -> None:
        """Write whole blocks, (local, remote) ids, until the library reports their arrival.

        `pause_s` lies between two polls.
        """
        handle = self._agent.make_prepped_xfer(
            "WRITE",
            self._local,
            np.array([local for local, _ in pairs], dtype=np.int32),
            self._remote,
            np.array([remote for _, remote in pairs], dtype=np.int32),
            b"write",
        )
        deadline = time.perf_counter() + DEADLINE_S
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() < deadline:
            if pause_s:
                time.sleep(pause_s)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"the bare library's write ended in {state}")

    def send(self, message: bytes) -> None:
        self._agent.send_notif(self._peer, message)

    def receive(
        self, wanted: bytes, count: int, *, answers: bool = False, pause_s: float = 0.0
    ) -> None:
        """Poll until `count` messages `wanted` have come, each sent back if it `answers`."""
        deadline = time.perf_counter() + DEADLINE_S
        while count and time.perf_counter() < deadline:
            for messages in self._agent.get_new_notifs().values():
                for message in messages:
                    if message == wanted:
                        count -= 1
                        if answers:
                            self.send(message)
            if pause_s:
                time.sleep(pause_s)
        if count:
            raise TransferError(f"{count} messages {wanted!r} did not arrive in {DEADLINE_S:g} s")

    def close(self) -> None:
        for prepared in (self._local, self._remote):
            if prepared is not None:
                prepared.release()
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        self._local = self._remote = self._registered = self._agent = None

    def _prepare(self, side: str, base_address: int) -> Any:
        num_blocks, block_bytes = len(self._kv.tensor), self._kv.block_bytes
        descriptors = np.empty((num_blocks, 3), dtype=np.uint64)
        descriptors[:, 0] = base_address + np.arange(num_blocks, dtype=np.uint64) * block_bytes
        descriptors[:, 1] = block_bytes
        descriptors[:, 2] = self._kv.device_id
        listed = self._agent.get_xfer_descs(descriptors, self._kv.memory)
        return self._agent.prep_xfer_dlist(side, listed)
