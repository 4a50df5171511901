"""Tasks of a process's life: they go on after an error, and end the process when they cannot."""

import asyncio
import os
import subprocess
import sys

import pytest

from tandem.runtime.tasks import EXIT_TASK_FAILED, cancel, ends_within, keep_running
from tests.services import eventually

HOPELESS = """
import asyncio
from tandem.runtime import tasks
tasks._MAX_PAUSE_S = 0.01

async def fail() -> None:
    raise ValueError("hopeless")

async def main() -> None:
    await tasks.keep_running("the follower of x", fail)

asyncio.run(main())
"""


async def test_after_an_error_the_work_begins_again_and_the_error_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_runs = 0

    async def work() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            raise ValueError("a strange key")
        if num_runs == 2:
            strange = asyncio.get_running_loop().create_future()
            strange.cancel()
            await strange
        await asyncio.sleep(60)

    task = keep_running("the follower of x", work)
    await eventually(lambda: num_runs == 3)
    assert "the follower of x failed" in caplog.text
    assert "a strange key" in caplog.text
    assert "was cancelled by a future" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


def test_work_that_always_fails_ends_the_process_loudly() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOPELESS], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert ended.returncode == EXIT_TASK_FAILED
    assert "the follower of x failed 12 times in a row; the process ends" in ended.stderr
    assert "ValueError: hopeless" in ended.stderr


async def test_a_cancelled_task_has_ended_and_its_error_is_dropped() -> None:
    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("too late")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await cancel(task)
    assert isinstance(task.exception(), ValueError)
    await cancel(None)


async def test_work_is_given_up_after_its_limit_and_its_own_error_propagates() -> None:
    event = asyncio.Event()
    assert not await ends_within(event.wait(), 0.01)
    event.set()
    assert await ends_within(event.wait(), 10.0)
    with pytest.raises(KeyError):
        await ends_within(fail_with_a_key(), 10.0)


async def fail_with_a_key() -> None:
    raise KeyError("of the work")
