"""Rank 0's view of the other ranks: their processes, their steps, and their end."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import Shard
from tandem.engine.batch.batch import PackedStep
from tandem.engine.batch.rows import BatchRows, RowChanges
from tandem.engine.config import EngineConfig
from tandem.engine.ranks.apart import ApartRank
from tandem.engine.ranks.channel import ReadyMessage, StartMessage, receive, send
from tandem.engine.ranks.marks import ALL_LAYERS, Mark, MarkedEvent
from tandem.engine.ranks.rank import Rank
from tandem.engine.ranks.step_message import StepMessage
from tandem.engine.schedule.sequence import OnLayers
from tandem.engine.step.outcome import DeviceLostError
from tandem.kernels.ranks.missing import MissingRankError
from tandem.runtime.errors import ModelError
from tandem.runtime.local.temporary_folder import TemporaryFolder
from tandem.runtime.process.logs import log_format

if TYPE_CHECKING:
    from tandem.engine.ranks.shared_memory import SharedFiles

logger = logging.getLogger(__name__)

Announce = Callable[[int], None]  # of a number of layers whose K/V is stored

MODULE = "tandem.engine.execution.follower"
# A rank that a signal has stopped may go on: a shell stops all of a job, and continues all.
STOPPED_S = 1.0
LOOK_S = 0.05  # between looks at a stopped one
NOTICED_S = 2.0  # in which the end of a process is
END_S = 5.0  # of a rank whose channel is closed
REASON_S = 30.0  # in which a process that closed its channel has ended, and its watcher knows how


class Followers:
    """The processes of ranks 1 and up, which follow the steps of this one, rank 0.

    When one ends or stops, all end: `listen`'s function is called on a thread of its own, and every
    later call raises DeviceLostError. `close` ends them, and may be called more than once.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        num_segments: int,
        devices: Sequence[str],
        module: str | None = None,
    ) -> None:
        """Start a rank on each of `devices` after the first, which is that of this process.

        `module` is the program of each, and calls follower.main; None: it is that one.
        """
        self._module = module or MODULE
        self.order_channels: list[socket.socket] = []  # to the ranks with a pool of their own
        self._stack = ExitStack()  # of what the ranks have in common
        self._files: SharedFiles | None = None
        self._folder = ""
        shard = Shard(model, config.tp, 0)
        self.rank: Rank
        if are_apart(config):
            folder = TemporaryFolder("ranks")
            self._stack.callback(folder.remove)
            self._folder = str(folder.path)
            where = shard, torch.device(devices[0]), self._folder
            self.rank = ApartRank(*where, self._wait_until_ready)
        else:
            self.rank = self._shared_rank(shard)
        self._num_steps = self._num_ended = 0
        self._lost: str | None = None  # the reason
        self._has_lost = threading.Event()
        self._on_lost: Callable[[DeviceLostError], None] | None = None
        self._lock = threading.Lock()  # of the two above
        self._is_closing = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._channels: list[socket.socket] = []
        try:
            for rank in range(1, config.tp):
                on_device = config.model_copy(update={"device": devices[rank]})
                self._start(on_device, rank, num_segments)
        except BaseException:
            self.close()
            raise

    def _shared_rank(self, shard: Shard) -> Rank:
        # Not at the top: it loads the kernels in C.
        from tandem.engine.ranks.shared_memory import SharedFiles, SharedRank

        self._files = SharedFiles.create(shard.whole, shard.size)
        self._stack.callback(self._files.close)
        return SharedRank(shard, self._files, os.getpid(), self._wait_until_ready)

    def _start(self, config: EngineConfig, rank: int, num_segments: int) -> None:
        ours, theirs = socket.socketpair()
        self._channels.append(ours)
        files, orders = self._files, None
        with ExitStack() as stack:
            stack.enter_context(theirs)
            shared = [files.exchange, files.pool] if files else []
            if files is None:
                near, far = socket.socketpair()
                self.order_channels.append(near)
                orders = stack.enter_context(far).fileno()
                shared = [orders]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *shared),
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        start = StartMessage(
            config.model_dump_json(),
            rank,
            num_segments,
            os.getpid(),
            files.exchange if files else None,
            files.pool if files else None,
            self._folder,
            orders,
            "debug" if logger.isEnabledFor(logging.DEBUG) else "error",  # rank 0 says the rest
            log_format(),
        )
        with suppress(OSError):  # the process has ended, which its watcher finds
            send(ours, msgspec.msgpack.encode(start))
        name = f"tandem-rank-{rank}"
        watched = rank, process, config.tp
        watcher = threading.Thread(target=self._watch, args=watched, name=name, daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _wait_until_ready(self) -> None:
        """Return once all ranks have their weights. Raises ModelError with the reason of one."""
        for rank, channel in enumerate(self._channels, 1):
            with channel.makefile("rb") as file:
                data = receive(file)
            if data is None:
                self._watchers[rank - 1].join(REASON_S)
                self._lose(f"rank {rank} ended before it was ready")
                raise self._error()
            ready = msgspec.msgpack.decode(data, type=ReadyMessage)
            if ready.error:
                raise ModelError(f"rank {rank}: {ready.error}")
        for channel in self._channels:
            with suppress(OSError):  # its watcher finds it
                send(channel, b"")

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return [process.pid for process in self._processes]

    @contextmanager
    def step(
        self,
        step: PackedStep,
        changes: RowChanges | None,
        table: BatchRows,
        announce: Announce | None,
        boundaries: Collection[int],
        *,
        is_recorded: bool = False,
    ) -> Iterator[Announce | None]:
        """Let all ranks compute a step, whose changes were applied here, beside the body.

        Yields `announce` as the body has to call it: once all ranks have stored those layers.
        Raises DeviceLostError, also in place of any other error of the body: ranks that stand at
        different products can't go on.
        """
        self.check()
        self._num_steps += 1
        boundaries = () if announce is None else boundaries
        known = None if self.rank.draws_apart else table
        where = self._num_steps, step, changes, known, boundaries
        message = StepMessage.of(*where, is_recorded=is_recorded)
        data = msgspec.msgpack.encode(message)
        try:
            for channel in self._channels:
                send(channel, data)
            yield None if announce is None else partial(self._announce, announce)
        except MissingRankError as error:
            self._lose(f"rank {error.rank} did not arrive in step {self._num_steps}")
            raise self._error() from error
        except Exception as error:
            # It may be that of a connection whose other end is gone: its watcher says whose.
            if self.rank.draws_apart or isinstance(error, OSError):
                self._has_lost.wait(NOTICED_S)
            self._lose(f"rank 0 failed in step {self._num_steps}: {error}")
            raise self._error() from error

    def _announce(self, announce: Announce, num_layers: int) -> None:
        self.rank.meet()
        announce(num_layers)

    def marked(self, on_layers: OnLayers) -> OnLayers:
        """Return `on_layers` as this step calls it: its events are MarkedEvents."""

        def announce(num_layers: int, event: Any) -> None:
            marked: Any = MarkedEvent((self._num_steps, num_layers), event)
            on_layers(num_layers, marked)

        return announce

    @property
    def ended_mark(self) -> Mark:
        """The mark of the last step that has ended here. From any thread."""
        return self._num_ended, ALL_LAYERS

    def end_of_step(self) -> Callable[[], None]:
        """Return what is to be called at the end of the last step; it raises as `check` does."""
        number = self._num_steps

        def end() -> None:
            self.check()
            self._num_ended = number

        return end

    def check(self) -> None:
        """Raise DeviceLostError when a rank has ended."""
        if self._lost is not None:
            raise self._error()

    def _error(self) -> DeviceLostError:
        assert self._lost is not None
        return DeviceLostError(self._lost)

    def listen(self, on_lost: Callable[[DeviceLostError], None]) -> None:
        """Call `on_lost` once when a rank has ended: at once, where that is so already."""
        with self._lock:
            self._on_lost = on_lost
            is_lost = self._lost is not None
        if is_lost:
            on_lost(self._error())

    def close(self) -> None:
        """End all ranks and wait for their processes; none of a step may be under way."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        for channel in (*self._channels, *self.order_channels):
            channel.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._channels.clear()
        self.rank.close()
        self._stack.close()

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None or self._is_closing.is_set():
                return
            self._lost = reason
            self._has_lost.set()
            on_lost = self._on_lost
        self.rank.end_waiting()
        for process in list(self._processes):
            process.kill()
        if on_lost is not None:
            on_lost(self._error())

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]", num_ranks: int) -> None:
        """Wait for the end of a rank's process, or for a signal that stops it."""
        name, ends = f"rank {rank} of {num_ranks} (pid {process.pid})", os.WEXITED | os.WNOWAIT
        while not self._is_closing.is_set():
            try:
                found = os.waitid(os.P_PID, process.pid, ends | os.WSTOPPED)
                assert found is not None
                if found.si_code == os.CLD_STOPPED:
                    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                    if self._goes_on(process.pid):
                        continue
            except ChildProcessError:  # taken by another thread
                found = None
            self._lose(f"{name} {_event(found)} in or after step {self._num_steps}")
            return

    def _goes_on(self, pid: int) -> bool:
        """Return True when a stopped process is continued soon."""
        deadline = time.monotonic() + STOPPED_S
        while time.monotonic() < deadline and not self._is_closing.wait(LOOK_S):
            if os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOHANG) is not None:
                return True
        return False


def are_apart(config: EngineConfig) -> bool:
    """Return True for ranks with the kernels of GPUs, which each have a pool of their heads."""
    return config.kernels == "triton"


def _event(found: "os.waitid_result | None") -> str:
    if found is None:
        return "ended"
    if found.si_code == os.CLD_EXITED:
        return f"ended with status {found.si_status}"
    verb = "was stopped" if found.si_code == os.CLD_STOPPED else "was killed"
    return f"{verb} by {signal.Signals(found.si_status).name}"
