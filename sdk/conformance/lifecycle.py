"""Checks that need an engine of their own, and of what is left when it is gone."""

import asyncio
import threading

from tandem.sdk.conformance.checks import WORKER_ID
from tandem.sdk.conformance.errors import (
    CleanupWithoutStartFailed,
    PartialStartCleanupFailed,
    TasksLeaked,
    ThreadsLeaked,
)
from tandem.sdk.conformance.streams import ConformanceSettings, bounded, told
from tandem.sdk.engine.llm_engine import LLMEngine

# Threads of the event loop's default executor stay for its next user.
_POOL_THREADS = ("asyncio_", "ThreadPoolExecutor")
_SETTLE_S = 1.0
_POLL_S = 0.02


async def cleanup_without_start(engine: LLMEngine, settings: ConformanceSettings) -> None:
    """Raises CleanupWithoutStartFailed."""
    try:
        await bounded(engine.cleanup(), settings.cleanup_timeout_s)
    except Exception as error:
        raise CleanupWithoutStartFailed(f"cleanup() raised {told(error)}") from error


async def cleanup_after_partial_start(engine: LLMEngine, settings: ConformanceSettings) -> None:
    """Cuts start() short where it first waits. Raises PartialStartCleanupFailed.

    What start() itself makes of the cancellation is its own affair, as long as it ends.
    """

    async def start() -> None:
        await engine.start(WORKER_ID)

    starting = asyncio.create_task(start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting}, timeout=settings.start_timeout_s)
    try:
        if not starting.done():
            raise TimeoutError(f"start() did not end within {settings.start_timeout_s:g} s")
        await bounded(engine.cleanup(), settings.cleanup_timeout_s)
    except Exception as error:
        raise PartialStartCleanupFailed(f"cleanup() after half a start(): {told(error)}") from error
    finally:
        if starting.done() and not starting.cancelled():
            starting.exception()  # seen, so that the loop does not report it


class Leftovers:
    """What runs in this process beside the engine; afterwards, what the engine left behind."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())

    async def check_tasks(self) -> None:
        """Raises TasksLeaked when tasks that were not there before do not end soon."""
        left = asyncio.all_tasks() - self._tasks
        if left:
            _, left = await asyncio.wait(left, timeout=_SETTLE_S)
        if left:
            names = ", ".join(sorted(_task_name(task) for task in left))
            for task in left:
                task.cancel()
            raise TasksLeaked(f"{len(left)} tasks run on: {names}")

    async def check_threads(self) -> None:
        """Raises ThreadsLeaked when threads that keep a process alive do not end soon."""
        deadline = asyncio.get_running_loop().time() + _SETTLE_S
        while left := self._new_threads():
            if asyncio.get_running_loop().time() > deadline:
                raise ThreadsLeaked(f"{len(left)} threads run on: {', '.join(sorted(left))}")
            await asyncio.sleep(_POLL_S)

    def _new_threads(self) -> list[str]:
        new = set(threading.enumerate()) - self._threads
        return [
            each.name for each in new if not each.daemon and not each.name.startswith(_POOL_THREADS)
        ]


def _task_name(task: asyncio.Task[object]) -> str:
    work = task.get_coro()
    return getattr(work, "__qualname__", task.get_name())
