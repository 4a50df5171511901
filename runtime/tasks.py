"""Tasks that live as long as their process: an error is logged, and the work begins again."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

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
