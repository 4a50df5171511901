"""The life of every process: startup, serve, drain, stop."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum
from typing import Protocol, TypeVar

from tandem.runtime.process.loop_watch import LoopWatch
from tandem.runtime.tasks import ends_within

logger = logging.getLogger(__name__)

EXIT_IMPATIENT = 70  # a second signal came before the first was served
_GC_THRESHOLD = 5000  # objects more than at the last collection; Python's own is 700
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BUFFER_BYTES = 256 * 1024
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Stage = Callable[[], Awaitable[None]]
S = TypeVar("S", bound="Startable")


def freeze_gc() -> None:
    """Exclude the present objects from garbage collection, and collect less often.

    With a model loaded, a full collection stops the process for 0.14 s. Requests leave no cycles,
    and at Python's own threshold each wave of them would cause a collection. Memory that the start
    has freed returns to the system, from the arenas of threads that have ended too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    with contextlib.suppress(AttributeError, OSError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)


def return_large_buffers() -> None:
    """Let glibc return every large buffer to the system when it is freed.

    By default glibc keeps buffers of a size once one was freed: a frontend that has read a few
    bodies of megabytes would hold tens of megabytes. With another C library this does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BUFFER_BYTES)


@contextlib.contextmanager
def signals(is_ending: Callable[[], bool], end: Callable[[str], object]) -> Iterator[None]:
    """Call `end` with the name of a signal: SIGTERM, SIGINT or SIGHUP.

    A signal while `is_ending` ends the process at once with status 70. Only the main thread can
    call this.
    """

    def on_signal(number: signal.Signals) -> None:
        if is_ending():
            logger.warning("second signal (%s): exiting at once", number.name)
            os._exit(EXIT_IMPATIENT)
        end(number.name)

    with handled(on_signal, is_ending):
        yield


@contextlib.contextmanager
def handled(
    on_signal: Callable[[signal.Signals], object], is_ending: Callable[[], bool]
) -> Iterator[None]:
    """Call `on_signal` for each signal that ends a process.

    SIGHUP, of a terminal that was closed, comes more than once: it is passed over while
    `is_ending`, and altogether where the process was started to ignore it, as by nohup.
    """
    loop = asyncio.get_running_loop()

    def pass_on(number: signal.Signals) -> None:
        if number is not signal.SIGHUP or not is_ending():
            on_signal(number)

    numbers = list(_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, pass_on, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Startable(Protocol):
    """A part of a process that is started and closed."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def started(part: S) -> AsyncIterator[S]:
    """Start a part of the process for the body; close it at the end, and if it does not start."""
    try:
        await part.start()
        yield part
    finally:
        await part.close()


class State(Enum):
    """The state of a process; it only moves forward."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Runs a process from `startup` to `stop`; a signal or `shut_down` begins the end."""

    def __init__(self, *, drain_timeout_s: float = 10.0) -> None:
        self.state = State.STARTING
        self._drain_timeout_s = drain_timeout_s
        self._ending = asyncio.Event()

    def shut_down(self, reason: str) -> None:
        """Begin the orderly end; idempotent."""
        if not self._ending.is_set():
            logger.info("shutting down: %s", reason)
            self._ending.set()

    async def run(self, *, startup: Stage, drain: Stage, stop: Stage) -> None:
        """Startup, serve until asked to end, drain for at most `drain_timeout_s`, stop.

        A request to end during startup cancels the startup and drains too: callers may know the
        process by then. `stop` always runs, also when startup fails; both must allow for parts that
        did not start. A second signal ends the process at once with status 70. Only the main thread
        can call this.
        """
        with signals(self._ending.is_set, self.shut_down):
            try:
                if await self._start(startup):
                    self.state = State.SERVING
                    with LoopWatch():
                        await self._ending.wait()
                self.state = State.DRAINING
                if not await ends_within(drain(), self._drain_timeout_s):
                    logger.warning("work remained after %g s of draining", self._drain_timeout_s)
            finally:
                self.state = State.DRAINING
                await stop()
                self.state = State.STOPPED

    async def _start(self, startup: Stage) -> bool:
        """Return True when startup completed before the end was requested; raise its errors."""
        starting = asyncio.ensure_future(startup())
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return True
            return False
        finally:
            for task in (starting, ending):
                task.cancel()
            await asyncio.gather(starting, ending, return_exceptions=True)
