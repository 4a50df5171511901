"""Stopped and stuck peers are noticed in time; living ones are left alone."""

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tests.processes import output_of
from tests.runtime.plane.ends import calling, hold, serving
from tests.services import eventually

NOTICE_S = 3.0 + 12.0  # the promise, and what a loaded test machine may add
QUICK = RuntimeConfig(heartbeat_interval_s=0.1)
HOLD = {"hold": hold}


@asynccontextmanager
async def peer(*arguments: str) -> AsyncIterator[tuple[ChildProcess, str]]:
    """A plane_peer process and the first line it printed."""
    script = str(Path(__file__).parent / "plane_peer.py")
    command = [sys.executable, script, *arguments]
    process = await ChildProcess.start_piped(command, stdout=PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, line.decode().strip()
    finally:
        process.kill()
        await output_of(process)


async def test_a_stopped_server_is_noticed_within_three_seconds() -> None:
    async with peer("serve") as (process, address), calling(RuntimeConfig()) as client:
        stream = await client.open(address, "hold", b"", RequestContext())
        assert await anext(stream) == b"started"
        process.signal(signal.SIGSTOP)
        stopped_s = time.perf_counter()
        with pytest.raises(ConnectionLostError, match=address):
            await anext(stream)
        assert time.perf_counter() - stopped_s < NOTICE_S


async def test_a_stopped_client_is_noticed_within_three_seconds() -> None:
    async with (
        serving(RuntimeConfig(), HOLD) as server,
        peer("call", server.address) as (process, item),
    ):
        assert item == "started"
        assert len(server.running) == 1
        process.signal(signal.SIGSTOP)
        await eventually(lambda: not server.running, NOTICE_S)


async def test_a_server_that_is_busy_without_progress_is_given_up() -> None:
    impatient = QUICK.model_copy(update={"stall_timeout_s": 0.5})
    async with (
        serving(QUICK, HOLD, progress=lambda: (7, True)) as server,
        calling(impatient) as client,
    ):
        stream = await client.open(server.address, "hold", b"", RequestContext())
        await anext(stream)
        with pytest.raises(ConnectionLostError, match="busy without progress"):
            await anext(stream)


async def test_progress_keeps_a_busy_server_alive() -> None:
    steps = itertools.count()
    impatient = QUICK.model_copy(update={"stall_timeout_s": 0.5})
    async with (
        serving(QUICK, HOLD, progress=lambda: (next(steps), True)) as server,
        calling(impatient) as client,
    ):
        stream = await client.open(server.address, "hold", b"", RequestContext())
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.wait({waiting}, timeout=1.0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
