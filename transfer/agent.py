"""The transfer agent: one transport on its own thread, awaited from asyncio.

The library is single-threaded, and a post over shared memory blocks for the whole copy, so
everything that touches it runs on this thread. It sleeps on a condition: a command wakes it at
once; otherwise it polls, often while something is in flight and rarely when idle.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from tandem.runtime.errors import TransferError
from tandem.runtime.messages import TransferMetadata
from tandem.transfer.checksum import block_checksums, checksum_name
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tandem.transfer.loopback import PROCESS_FABRIC, LoopbackTransport
from tandem.transfer.nixl import NixlTransport
from tandem.transfer.reactor import TransferReactor, WriteOrder
from tandem.transfer.transport import BlockGrid, Memory, Transport

T = TypeVar("T")

_BUSY_S = 0.005  # polls stay frequent this long after the last sign of a transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvPoolView:
    """The pool that an agent serves: the tensor for checksums, the numbers for transfers."""

    tensor: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    base_address: int
    block_bytes: int
    num_blocks: int
    memory: Memory
    device_id: int

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(
            self.base_address, self.block_bytes, self.num_blocks, self.memory, self.device_id
        )


class TransferAgent:
    """Moves KV blocks between this worker's pool and its peers'.

    Its coroutines run on the loop that called `start`. Failures are TransferErrors.
    """

    def __init__(
        self,
        config: TransferConfig,
        layout: KvLayout,
        kv: KvPoolView,
        instance_id: str,
        epoch: str,
    ) -> None:
        if layout.block_bytes != kv.block_bytes:
            raise TransferError(
                f"the layout's blocks are {layout.block_bytes} bytes, the pool's {kv.block_bytes}"
            )
        self._config = config
        self._layout = replace(layout, checksum=checksum_name(kv.memory))
        self._kv = kv
        self._instance_id = instance_id
        self._epoch = epoch
        self._name = f"{instance_id}.{epoch}"
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._num_expected = 0
        self._busy_until = 0.0  # perf_counter seconds
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_notification: Callable[[bytes], None] | None = None
        self._reactor: TransferReactor | None = None  # used on the transfer thread
        self._agent_metadata = b""

    async def start(self, on_notification: Callable[[bytes], None]) -> None:
        """Register the pool. `on_notification` gets each message that comes, on this loop."""
        self._loop = asyncio.get_running_loop()
        self._on_notification = on_notification
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="transfer", daemon=True
        )
        self._thread.start()
        await started
        logger.info("transfer agent %s serves %d blocks", self._name, self._kv.num_blocks)

    def metadata(self) -> TransferMetadata:
        """What peers need to write into this pool; complete after `start`."""
        return TransferMetadata(
            instance_id=self._instance_id,
            epoch=self._epoch,
            layout_hash=self._layout.digest(),
            layout=self._layout.describe(),
            transport=self._config.backend,
            agent_metadata=self._agent_metadata,
            memory=self._kv.memory,
            device_id=self._kv.device_id,
            base_address=self._kv.base_address,
            block_bytes=self._kv.block_bytes,
            num_blocks=self._kv.num_blocks,
        )

    @property
    def longest_write_s(self) -> float:
        """The longest recent write, from post to completion; a lease's margin is at least this."""
        return self._reactor.longest_write_s if self._reactor else 0.0

    def expect(self, change: int) -> None:
        """One more (+1) or one less (-1) handoff under way: poll often while there is one.

        0 says that one is about to arrive, as a first token does of its KV.
        """
        with self._wake:
            self._num_expected += change
            self._busy_until = time.perf_counter() + _BUSY_S
            assert self._num_expected >= 0, "expect(-1) without its expect(+1)"
            self._wake.notify()

    async def connect(self, peer: TransferMetadata) -> None:
        """Make `peer` writable; idempotent per epoch, and an older epoch of it is dropped.

        Layouts are compared before anything of `peer.agent_metadata` is decoded.
        """
        ours = self.metadata()
        if (peer.layout_hash, peer.transport) != (ours.layout_hash, ours.transport):
            raise TransferError(
                f"KV layouts differ: {self._instance_id} has [{ours.layout} {ours.transport}], "
                f"{peer.instance_id} has [{peer.layout} {peer.transport}]"
            )
        if peer.block_bytes != ours.block_bytes or peer.num_blocks < 1:
            raise TransferError(
                f"{peer.instance_id} announces {peer.num_blocks} blocks of {peer.block_bytes} "
                f"bytes, not {ours.block_bytes}"
            )
        await self._call(lambda reactor: reactor.connect(peer))

    async def disconnect(self, peer_instance: str) -> None:
        """Tear the connection down; writes under way to it fail. Unknown peers are fine."""
        await self._call(lambda reactor: reactor.drop_peer(peer_instance, "disconnected"))

    async def write(
        self,
        peer_instance: str,
        peer_epoch: str,
        pairs: Sequence[tuple[int, int]],
        make_notification: bytes,
        *,
        post_before: float | None = None,
    ) -> None:
        """Write blocks, `pairs` of (local, remote) ids; returns when they are in the peer's memory.

        The peer hears `make_notification` after the data. Nothing is posted from `post_before` on
        (a `time.perf_counter()` reading: the lease's end less its margin). When this raises
        TransferError nothing of it can land any more, and `connect` comes before the next write.
        Cancelling the caller stops its waiting, not the write.
        """
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[None] = self._loop.create_future()
        order = WriteOrder(
            peer_instance,
            peer_epoch,
            pairs,
            make_notification,
            post_before,
            lambda error: self._resolve(future, error),
        )
        self._submit(lambda reactor: reactor.post(order), future)
        await future

    async def notify(self, peer_instance: str, data: bytes) -> None:
        """Send a message that belongs to no write."""
        await self._call(lambda reactor: reactor.notify(peer_instance, data))

    async def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """The checksums of blocks of our own pool, computed on the transfer thread."""
        return await self._call(lambda _: block_checksums(self._kv.tensor, block_ids))

    async def close(self) -> None:
        """Stop the thread and give everything back; writes under way fail. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)

    async def _call(self, fn: Callable[[TransferReactor], T]) -> T:
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[T] = self._loop.create_future()
        self._submit(lambda reactor: self._resolve(future, None, fn(reactor)), future)
        return await future

    def _submit(self, fn: Callable[[TransferReactor], None], future: asyncio.Future[Any]) -> None:
        """Queue `fn` for the thread; what it raises is set on `future`."""

        def command() -> None:
            assert self._reactor is not None
            try:
                fn(self._reactor)
            except Exception as exc:
                self._resolve(future, exc)

        with self._wake:
            if self._thread is None or self._stopping:
                raise TransferError(f"transfer agent {self._name} is not running")
            self._commands.append(command)
            self._wake.notify()

    def _resolve(
        self, future: asyncio.Future[Any], error: Exception | None, result: object = None
    ) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(_without_frames(error))

        self._to_loop(settle)

    def _to_loop(self, fn: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(fn)

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            reactor = self._reactor = self._open()
        except TransferError as exc:
            self._resolve(started, exc)
            return
        self._resolve(started, None)
        while not self._stopping:
            for command in self._take_commands(reactor):
                command()
            self._poll(reactor)
        for command in self._take_commands(reactor):
            command()
        reactor.close()

    def _open(self) -> TransferReactor:
        transport: Transport = (
            NixlTransport(self._name)
            if self._config.backend == "nixl"
            else LoopbackTransport(self._name, PROCESS_FABRIC)
        )
        transport.register(self._kv.grid)
        self._agent_metadata = transport.metadata()
        return TransferReactor(
            self._name, transport, self._kv.num_blocks, self._config.write_timeout_s
        )

    def _take_commands(self, reactor: TransferReactor) -> list[Callable[[], None]]:
        with self._wake:
            if not self._commands and not self._stopping:
                self._wake.wait(self._poll_interval_s(reactor))
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _poll_interval_s(self, reactor: TransferReactor) -> float:
        if reactor.num_writes:
            return self._config.poll_busy_us / 1e6
        if self._num_expected:
            busy = time.perf_counter() < self._busy_until
            return (self._config.poll_busy_us if busy else self._config.poll_expect_us) / 1e6
        return self._config.poll_idle_ms / 1e3

    def _poll(self, reactor: TransferReactor) -> None:
        try:
            notices = reactor.poll()
        except TransferError as exc:
            logger.warning("transfer agent %s: %s", self._name, exc)
            return
        except Exception:
            logger.exception("transfer agent %s", self._name)  # its thread must outlive a bug
            return
        if notices:
            self._busy_until = time.perf_counter() + _BUSY_S
            self._to_loop(lambda: self._hand_over(notices))

    def _hand_over(self, notices: list[bytes]) -> None:
        assert self._on_notification is not None
        for notice in notices:
            self._on_notification(notice)


def _without_frames(error: Exception) -> Exception:
    """The frames of the transfer thread would keep the library's objects alive past `close`."""
    if error.__cause__ is not None:
        error.__cause__.with_traceback(None)
    return error.with_traceback(None)
