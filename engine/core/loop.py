"""The engine's own thread, and its connection to asyncio."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from tandem.engine.core.engine import Engine
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.step.layer_stream import LayersListener
from tandem.engine.step.outcome import DeviceLostError
from tandem.runtime.errors import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[Engine], object]

# The engine thread computes for milliseconds at a time; asyncio must not wait 5 ms for the GIL.
SWITCH_INTERVAL_S = 1e-4
# The longest that the engine thread waits for asyncio to take a step's tokens. Without this wait a
# model of short steps computes several before asyncio gets the GIL, and the first token leaves with
# the fifth. Where steps overlap the device has work meanwhile.
HAND_OVER_S = 1e-3
# Walking the pool takes milliseconds: only an engine that has been idle does it.
IDLE_CHECK_AFTER_S = 1.0


def build_in_thread(build: Callable[[], T]) -> T:
    """Call `build` on a thread of its own and return its result; blocks.

    A thread that has computed with OpenMP keeps its team of threads while it lives. If that were
    the caller's thread, libgomp would count more threads than cores and let the engine's threads
    sleep at every barrier: a decode step took 31 ms that way and 22 ms without.
    """
    with ThreadPoolExecutor(1, "tandem-build") as builder:
        return builder.submit(build).result()


class EngineLoop:
    """The engine thread. Commands run between steps, in the order in which they were posted.

    That is between the collection of one step and the launch of another: where steps overlap the
    device computes one meanwhile.

    `on_outputs` is called on the asyncio thread, once per step that has outputs. The engine's
    invariants are checked when it has been idle for a while; a violation is logged, and if `strict`
    also raised by `stop`.

    When the engine's device is lost, every sequence fails, and `on_device_lost` is called on the
    asyncio thread after their outputs. An engine without work notices it by `check_device`, which
    is called every `idle_check_after_s` and raises DeviceLostError: a transfer may have failed.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[SequenceOutput]], None],
        *,
        on_device_lost: Callable[[DeviceLostError], None] | None = None,
        check_device: Callable[[], None] = lambda: None,
        strict: bool = False,
        idle_check_after_s: float = IDLE_CHECK_AFTER_S,
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_device_lost = on_device_lost
        self._check_device = check_device
        self._strict = strict
        self._idle_check_after_s = idle_check_after_s
        self._violation: AssertionError | None = None
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._joining: list[Callable[[], object]] = []  # called after the launched step
        self._taken = threading.Event()  # asyncio has taken the last outputs
        self._taken.set()
        self._is_stopping = False
        self._num_steps = 0
        self._is_busy = False

    @property
    def progress(self) -> tuple[int, bool]:
        """(number of steps done, True while one is under way or due), for any thread."""
        return self._num_steps, self._is_busy

    def listen_to_layers(self, listener: LayersListener) -> None:
        """Call `listener` on the asyncio thread, within steps and before their outputs."""
        self._engine.on_layers = partial(self._to_asyncio, listener)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def post(self, fn: Command) -> None:
        """Run `fn` on the engine thread before its next step; log its errors."""
        self._commands.put(fn)

    def after_launched(self, fn: Callable[[], object]) -> None:
        """Call `fn` on the asyncio thread after the outputs of the launched step, or now.

        On the engine thread, by a command: its sequences join the step after that one.
        """
        if self._engine.num_in_flight:
            self._joining.append(fn)
        else:
            self._to_asyncio(fn)

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Run `fn` on the engine thread before its next step; return its result.

        Raises the error of `fn`, or UnavailableError once the loop is stopping.
        """
        if self._is_stopping:
            raise UnavailableError("the engine has stopped")
        answer: asyncio.Future[T] = self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = fn(engine)
            except Exception as error:
                self._to_asyncio(_answer_unless_done, answer, answer.set_exception, error)
            else:
                self._to_asyncio(_answer_unless_done, answer, answer.set_result, result)

        self._commands.put(run)
        return await answer

    async def stop(self) -> None:
        """Run the commands posted so far, then end the thread, whatever is unfinished."""
        if not self._is_stopping:
            self._is_stopping = True
            self._commands.put(None)
        await self._ended
        self._thread.join()
        if self._strict and self._violation is not None:
            raise self._violation

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._engine.has_work:
                    self._step()
            self._finish_launched()
        finally:
            self._to_asyncio(_answer_unless_done, self._ended, self._ended.set_result, None)

    def _run_commands(self) -> bool:
        """Run the posted commands; wait for one when the engine has no work. False: stop."""
        if self._engine.has_work and self._commands.empty():
            return True
        if not self._engine.has_work:
            self._is_busy = False
            command = self._wait_for_command()
        else:
            command = self._commands.get()
        self._is_busy = True
        while command is not None:
            try:
                command(self._engine)
            except Exception:
                logger.exception("a command to the engine failed")
            if self._commands.empty():
                return True
            command = self._commands.get()
        return False

    def _wait_for_command(self) -> Command | None:
        try:
            return self._commands.get(timeout=self._idle_check_after_s)
        except Empty:
            self._check_invariants()
        while True:
            try:
                self._check_device()
                return self._commands.get(timeout=self._idle_check_after_s)
            except Empty:
                continue
            except DeviceLostError as lost:
                self._announce_loss(lost)
                return self._commands.get()

    def _step(self) -> None:
        engine = self._engine
        lost: DeviceLostError | None = None
        try:
            engine.launch()
            if engine.overlap:
                self._taken.wait(HAND_OVER_S)
            outputs = engine.collect()
        except Exception as error:
            outputs = engine.fail_all(error)
            lost = error if isinstance(error, DeviceLostError) else None
        self._num_steps += 1
        self._hand_over(outputs)
        if lost is not None:
            self._announce_loss(lost)
        if not engine.overlap:
            self._taken.wait(HAND_OVER_S)

    def _announce_loss(self, lost: DeviceLostError) -> None:
        if self._on_device_lost is not None:
            self._to_asyncio(self._on_device_lost, lost)

    def _finish_launched(self) -> None:
        """Collect every launched step: the pool's memory must outlive its writes."""
        while self._engine.num_in_flight:
            self._hand_over(self._engine.collect())

    def _hand_over(self, outputs: list[SequenceOutput]) -> None:
        """Pass a step's outputs to asyncio. Waiting for `_taken` then also passes it the GIL."""
        if outputs:
            self._taken.clear()
            self._to_asyncio(self._deliver, outputs)
        for fn in self._joining:
            self._to_asyncio(fn)
        self._joining.clear()

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        try:
            self._on_outputs(outputs)
        finally:
            self._loop.call_soon(self._taken.set)  # after the writes that on_outputs scheduled

    def _check_invariants(self) -> None:
        try:
            self._engine.check_invariants()
        except AssertionError as violation:
            self._violation = violation
            logger.exception("the engine's invariants are violated")

    def _to_asyncio(self, fn: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            logger.debug("the event loop is closed, dropped %s", args)


def _answer_unless_done(
    future: "asyncio.Future[T]", settle: Callable[[object], None], outcome: object
) -> None:
    """Settle `future`, unless its waiter was cancelled meanwhile."""
    if not future.done():
        settle(outcome)
