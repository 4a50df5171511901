"""Checks that need an engine of their own, and checks for tasks and threads left behind."""

import asyncio
import threading

from tandem.sdk.conformance.checks import WORKER_ID
from tandem.sdk.conformance.errors import Failure
from tandem.sdk.conformance.streams import ConformanceSettings, bounded, failing_as
from tandem.sdk.engine.llm_engine import LLMEngine

# Threads of the event loop's default executor stay for its next user.
_POOL_THREADS = ("asyncio_", "uvloop_", "ThreadPoolExecutor")
_SETTLE_S = 1.0
_POLL_S = 0.02


async def cleanup_without_start(engine: LLMEngine, settings: ConformanceSettings) -> None:
    with failing_as(Failure.CleanupWithoutStartFailed, "cleanup() raised"):
        await bounded(engine.cleanup(), settings.cleanup_timeout_s)


async def cleanup_after_partial_start(engine: LLMEngine, settings: ConformanceSettings) -> None:
    """Cancel start() where it first waits, then call cleanup().

    start() may handle the cancellation in any way, as long as it ends.
    """

    async def start() -> None:
        await engine.start(WORKER_ID)

    starting = asyncio.create_task(start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting}, timeout=settings.start_timeout_s)
    if starting.done() and not starting.cancelled():
        starting.exception()  # retrieved, so that the loop does not report it
    with failing_as(Failure.PartialStartCleanupFailed, "cleanup() after half a start():"):
        if not starting.done():
            raise TimeoutError(f"start() did not end within {settings.start_timeout_s:g} s")
        await bounded(engine.cleanup(), settings.cleanup_timeout_s)


class Leftovers:
    """The tasks and threads that an engine leaves behind: those that were not there before it."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())

    async def check_tasks(self) -> None:
        """Raise TasksLeaked when new tasks do not end soon."""
        left = asyncio.all_tasks() - self._tasks
        if left:
            _, left = await asyncio.wait(left, timeout=_SETTLE_S)
        if left:
            names = [getattr(task.get_coro(), "__qualname__", task.get_name()) for task in left]
            for task in left:
                task.cancel()
            raise Failure.TasksLeaked.error(f"{len(left)} tasks run on: {', '.join(sorted(names))}")

    async def check_threads(self) -> None:
        """Raise ThreadsLeaked when new threads that keep the process alive do not end soon."""
        deadline = asyncio.get_running_loop().time() + _SETTLE_S
        while left := self._new_threads():
            if asyncio.get_running_loop().time() > deadline:
                raise Failure.ThreadsLeaked.error(
                    f"{len(left)} threads run on: {', '.join(sorted(left))}"
                )
            await asyncio.sleep(_POLL_S)

    def _new_threads(self) -> list[str]:
        new = set(threading.enumerate()) - self._threads
        return [
            each.name for each in new if not each.daemon and not each.name.startswith(_POOL_THREADS)
        ]
