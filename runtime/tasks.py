"""Tasks: those that live as long as their process, their end, and waiting with a limit."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

EXIT_TASK_FAILED = 71  # a task of the process's life kept failing
_MAX_FAILURES = 12  # in a row, about half a minute
_FIRST_PAUSE_S = 0.1  # doubled with each failure in a row
_MAX_PAUSE_S = 5.0
_HEALTHY_S = 10.0  # a run this long ends a row of failures

Work = Callable[[], Awaitable[None]]


def keep_running(name: str, work: Work) -> asyncio.Task[None]:
    """Run `work` again and again until the task is cancelled.

    A return starts the next run at once, an error after a pause. `work` that fails `_MAX_FAILURES`
    times in a row ends the process, with status 71: a process without it only seems to be well.
    """
    return asyncio.create_task(_keep_running(name, work), name=name)


async def _keep_running(name: str, work: Work) -> None:
    num_failures = 0
    while True:
        started_s = time.perf_counter()
        try:
            await work()
            num_failures = 0
            continue
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            logger.error("%s was cancelled by a future that it awaited", name)
        except Exception:
            logger.exception("%s failed", name)
        if time.perf_counter() - started_s > _HEALTHY_S:
            num_failures = 0
        num_failures += 1
        if num_failures == _MAX_FAILURES:
            logger.critical("%s failed %d times in a row; the process ends", name, num_failures)
            logging.shutdown()
            os._exit(EXIT_TASK_FAILED)
        await asyncio.sleep(min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (num_failures - 1)))


async def cancel(task: "asyncio.Future[Any] | None") -> None:
    """Cancel a task, if there is one, and wait for its end; its error is dropped."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ends_within(work: Awaitable[object], limit_s: float) -> bool:
    """Await `work`; return False when it was given up after `limit_s`. Its errors propagate."""
    try:
        # not wait_for, which can lose a cancellation at the moment when `work` ends
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        return False
    return True
