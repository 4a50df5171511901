"""The transfer agent of one rank: one transport on its own thread, awaited from asyncio.

The library is single-threaded, and a post over shared memory blocks for the whole copy, so every
call into it runs on this thread. The thread sleeps on a condition, and a command wakes it at once.
Otherwise it polls: without a pause right after a sign of a transfer, often while a transfer is in
flight, rarely when idle. It never waits for a GPU: peers get their notices only while it polls. A
command that must wait is a generator, and yields until the next poll.
"""

import asyncio
import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tandem.runtime.clock import wall_seconds
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.wire.cluster_messages import RankMetadata
from tandem.transfer.agents.backends import open_transport
from tandem.transfer.agents.rank_agent import NO_NOTICE
from tandem.transfer.agents.reactor import (
    HELLO,
    PeerRank,
    Selection,
    TransferOrder,
    TransferReactor,
)
from tandem.transfer.checksum import checksum_steps, part_checksums
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import BlockGrid, Event, KvMemory, Operation, Parts

T = TypeVar("T")
Steps = Generator[None, None, None]  # yields where it would wait

# Between polls while a transfer is in flight. Each takes the GIL: at 20 us the second token came a
# tenth later, on two cores.
_POLL_BUSY_S = 100e-6
_POLL_EXPECT_S = 600e-6  # while a handoff is expected but no transfer is in flight
_POLL_IDLE_S = 0.25  # otherwise, for peers that come
_BUSY_S = 0.005  # polls stay frequent this long after the last sign of a transfer
_MEETING_S = 1.0  # and this long after a peer has come, which measures the link
_SPIN_S = 0.0001  # polls without a pause, after a sign: spinning takes the GIL from the event loop
_ENDED = object()
_TIMER_SLACK_NS = 1  # the kernel's default of 50 us would double the pauses between polls

_PR_SET_TIMERSLACK = 29  # of <linux/prctl.h>

logger = logging.getLogger(__name__)


class TransferAgent:
    """Moves KV blocks between one rank's pool and those of its peers' ranks.

    Its coroutines run on the loop that called `start`. Failures are TransferErrors.
    """

    def __init__(
        self,
        config: TransferConfig,
        layout: KvLayout,
        kv: KvMemory,
        instance_id: str,
        epoch: str,
        rank: int = 0,
    ) -> None:
        if layout.block_bytes != kv.block_bytes:
            raise TransferError(
                f"the layout's blocks are {layout.block_bytes} bytes, the pool's {kv.block_bytes}"
            )
        self._config = config
        self._layout = layout
        self._kv = kv
        self._name = PeerRank(instance_id, epoch, rank).agent_name
        self._wake = threading.Condition()
        self._commands: deque[Steps] = deque()
        self._waiting: list[Steps] = []  # commands that have yielded; used on the transfer thread
        self._num_expected = 0
        self._busy_since = 0.0  # perf_counter seconds, of the last sign of a transfer
        self._met_at = -_MEETING_S  # perf_counter seconds, of the last new peer in either direction
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_notification: Callable[[bytes], None] | None = None
        self._reactor: TransferReactor | None = None  # used on the transfer thread
        self._agent_metadata = b""

    async def start(self, on_notification: Callable[[bytes], None]) -> None:
        """Register the pool. `on_notification` gets each incoming message, on this loop."""
        self._loop = asyncio.get_running_loop()
        self._on_notification = on_notification
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="transfer", daemon=True
        )
        self._thread.start()
        await started
        logger.info("transfer agent %s serves %d blocks", self._name, self._kv.num_blocks)

    def metadata(self) -> RankMetadata:
        """Return the data with which peers can reach this pool; complete after `start`."""
        return RankMetadata(self._agent_metadata, self._kv.device_id, self._kv.base_address)

    @property
    def longest_write_s(self) -> float:
        """The longest recent write, from post to completion; a lease's margin is at least this."""
        return self._reactor.longest_write_s if self._reactor else 0.0

    def expect(self, change: int) -> None:
        """Count one more (+1) or one less (-1) handoff; polls are frequent while there is one.

        0 announces that KV is about to arrive, as a first token does.
        """
        with self._wake:
            self._num_expected += change
            self._busy_since = time.perf_counter()
            assert self._num_expected >= 0, "expect(-1) without its expect(+1)"
            self._wake.notify()

    async def connect(self, peer: PeerRank, metadata: bytes, grid: BlockGrid) -> bool:
        """Make `peer` reachable, drop an older epoch of it; False if it was reachable already."""
        self._met_at = time.perf_counter()
        return await self._call(lambda reactor: reactor.connect(peer, metadata, grid))

    async def prepare(self, peer: PeerRank, selection: Selection) -> None:
        """Make the descriptors of this selection now, so that no transfer has to."""
        await self._call(lambda reactor: reactor.prepare(peer, selection))

    async def disconnect(self, peer_instance: str) -> None:
        """Tear the connections down; transfers under way fail. Unknown peers are fine."""
        await self._call(lambda reactor: reactor.drop_peer(peer_instance, "disconnected"))

    async def transfer(
        self,
        operation: Operation,
        peer: PeerRank,
        selection: Selection,
        pairs: Sequence[tuple[int, int]],
        notice: Callable[[Sequence[int]], bytes] = NO_NOTICE,
        *,
        checked: Parts | None = None,
        after: Event | None = None,
        post_before: float | None = None,
    ) -> bytes:
        """Move parts of blocks. `notice` is called on the transfer thread right before the post."""

        def post(reactor: TransferReactor, future: asyncio.Future[bytes]) -> Steps:
            sums: list[int] = []
            if checked is not None:
                sums = yield from self._checksums([local for local, _ in pairs], checked, after)
            message = notice(sums)
            order = TransferOrder(
                operation,
                peer,
                selection,
                pairs,
                message,
                post_before,
                lambda error: self._resolve(future, error, message),
            )
            reactor.post(order)
            self._busy_since = time.perf_counter()

        return await self._submit(post)

    async def notify(self, peer_instance: str, data: bytes) -> None:
        """Send a message that belongs to no write."""
        await self._call(lambda reactor: reactor.notify(peer_instance, data))

    async def checksums(self, block_ids: Sequence[int], parts: Parts) -> list[int]:
        """Return checksums of parts of blocks of the own pool, computed on the transfer thread."""

        def compute(_: TransferReactor, future: asyncio.Future[list[int]]) -> Steps:
            self._resolve(future, None, (yield from self._checksums(block_ids, parts, None)))

        return await self._submit(compute)

    def _checksums(
        self, block_ids: Sequence[int], parts: Parts, after: Event | None
    ) -> Generator[None, None, list[int]]:
        return checksum_steps(self._kv.tensor, block_ids, parts, self._layout.checksum, after)

    async def close(self) -> None:
        """Stop the thread and give everything back; transfers under way fail. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)

    async def _call(self, fn: Callable[[TransferReactor], T]) -> T:
        return await self._submit(lambda reactor, future: self._resolve(future, None, fn(reactor)))

    async def _submit(self, fn: Callable[[TransferReactor, asyncio.Future[T]], Steps | None]) -> T:
        """Queue `fn`, or the steps that it returns; return the result that it resolves a future to.

        Raise an exception of either. Any but this project's own becomes a TransferError, which
        every caller expects: a GPU raises others, as when its memory runs out. Nothing is posted by
        then.
        """
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> Steps:
            assert self._reactor is not None
            try:
                if (steps := fn(self._reactor, future)) is not None:
                    yield from steps
            except TandemError as exc:
                self._resolve(future, exc)
            except Exception as exc:
                logger.exception("transfer agent %s", self._name)
                error = TransferError(f"transfer agent {self._name}: {type(exc).__name__}: {exc}")
                self._resolve(future, error)

        with self._wake:
            if self._thread is None or self._stopping:
                raise TransferError(f"transfer agent {self._name} is not running")
            self._commands.append(command())
            self._wake.notify()
        return await future

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
        except Exception as exc:  # of any kind, or `start` would wait for ever
            self._resolve(started, exc)
            return
        self._resolve(started, None)
        while not self._stopping:
            self._run_commands(reactor)
            self._poll(reactor)
        self._run_commands(reactor)
        reactor.close()
        for command in self._waiting:
            with suppress(StopIteration):
                command.throw(TransferError(f"transfer agent {self._name} closes"))

    def _open(self) -> TransferReactor:
        _set_timer_slack()
        settle = None
        if self._kv.memory == "VRAM":
            # Imported here: a worker without a GPU may have no torch.
            import torch

            from tandem.transfer.cuda_context import begin_settling, ensure_cuda_context

            torch.cuda.set_device(self._kv.device_id)  # per thread; kernels launch on the current
            ensure_cuda_context(self._kv.device_id)
            settle = partial(begin_settling, self._kv.device_id)
        transport = open_transport(self._config.backend, self._name)
        grid = _grid_of(self._kv)
        transport.register(grid)
        self._agent_metadata = transport.metadata()
        parts = ((0, self._layout.head_bytes),)
        part_checksums(self._kv.tensor, [0], parts, self._layout.checksum)  # compiles it on a GPU
        timeout_s = self._config.write_timeout_s
        return TransferReactor(self._name, transport, grid.num_blocks, timeout_s, settle)

    def _run_commands(self, reactor: TransferReactor) -> None:
        commands = [*self._waiting, *self._take_commands(reactor)]
        self._waiting = [command for command in commands if next(command, _ENDED) is not _ENDED]

    def _take_commands(self, reactor: TransferReactor) -> list[Steps]:
        with self._wake:
            if not self._commands and not self._stopping:
                interval_s = self._poll_interval_s(reactor)
                if interval_s:
                    self._wake.wait(wall_seconds(interval_s))
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _poll_interval_s(self, reactor: TransferReactor) -> float:
        now = time.perf_counter()
        quiet_s = now - self._busy_since
        if quiet_s < _SPIN_S:
            return 0.0
        if reactor.num_transfers or self._waiting or quiet_s < _BUSY_S:
            return _POLL_BUSY_S
        if self._num_expected or now - self._met_at < _MEETING_S:
            return _POLL_EXPECT_S
        return _POLL_IDLE_S

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
            self._busy_since = time.perf_counter()
            if HELLO in notices:
                self._met_at = self._busy_since
            self._to_loop(lambda: self._hand_over(notices))

    def _hand_over(self, notices: list[bytes]) -> None:
        assert self._on_notification is not None
        for notice in notices:
            if notice != HELLO:
                self._on_notification(notice)


def _set_timer_slack() -> None:
    """Shorten the calling thread's pauses, on systems that can."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)


def _grid_of(kv: KvMemory) -> BlockGrid:
    num_blocks = kv.num_blocks + kv.num_spare_blocks
    return BlockGrid(kv.base_address, kv.block_bytes, num_blocks, kv.memory, kv.device_id)


def _without_frames(error: Exception) -> Exception:
    """Drop the transfer thread's frames: they keep the library's objects alive past `close`."""
    if error.__cause__ is not None:
        error.__cause__.with_traceback(None)
    return error.with_traceback(None)
