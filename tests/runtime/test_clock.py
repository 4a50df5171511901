"""The pace of time, in processes of their own: it changes a whole process."""

import subprocess
import sys
import time

from tandem.runtime.clock import set_pace, wall_seconds

PACED = """
import asyncio, sys, threading, time
wall, wall_monotonic = time.perf_counter, time.monotonic
from tandem.runtime.clock import set_pace, wall_seconds
set_pace(4.0)
import uvloop

async def bounded():
    try:
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    except TimeoutError:
        pass

async def waited():
    await asyncio.wait({asyncio.ensure_future(asyncio.Event().wait())}, timeout=0.05)

for way in (asyncio.sleep(0.05), bounded(), waited()):
    began = wall()
    uvloop.run(way)
    assert wall() - began >= 0.19  # 50 ms of the slow clock are 200 ms
began = wall()
time.sleep(0.05)
assert wall() - began >= 0.2

assert wall() <= 4 * time.perf_counter() <= wall()
assert wall_monotonic() <= 4 * time.monotonic() <= wall_monotonic()
assert wall_seconds(2.5) == 10.0
"""

CONFIGURED = """
import time
wall = time.perf_counter
from tandem.config.session import Session
session = Session([])
session.set("runtime.pace", 5.0, "--pace")
session.load()
assert wall() <= 5 * time.perf_counter() <= wall()
"""


def passes(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], timeout=100, check=True)


def test_timers_sleeps_and_durations_follow_one_slow_clock() -> None:
    passes(PACED)


def test_a_process_takes_its_pace_from_the_configuration() -> None:
    passes(CONFIGURED)


def test_without_a_pace_the_clock_is_that_of_the_wall() -> None:
    before = time.perf_counter
    set_pace(1.0)
    assert time.perf_counter is before and wall_seconds(2.0) == 2.0
