"""The watch of an event loop names the call in which it stands."""

import asyncio
import logging
import threading
import time

import pytest
from prometheus_client import REGISTRY

from tandem.runtime.process import loop_watch
from tandem.runtime.process.lifecycle import Lifecycle
from tandem.runtime.process.loop_watch import LoopWatch
from tests.services import eventually


def stand_still(watch: LoopWatch) -> None:
    end = time.perf_counter() + 60
    while not watch._call and time.perf_counter() < end:
        time.sleep(0.01)


def stood_s(call: str) -> float:
    return float(loop_watch.LoopMetrics().stood.labels(call)._value.get())


async def test_the_call_in_which_the_loop_stands_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tandem.runtime.process.loop_watch")
    monkeypatch.setattr(loop_watch, "_ROOT", __file__.removesuffix("test_loop_watch.py"))
    call = "test_loop_watch.py stand_still"
    before = stood_s(call)
    with LoopWatch() as watch:
        stand_still(watch)
        await eventually(lambda: stood_s(call) > before)
        stand_still(watch)
        await eventually(lambda: not watch._call)
    lines = [each for each in caplog.messages if "stand_still" in each]
    assert len(lines) == 1 and "the event loop stood for" in lines[0]
    assert stood_s(call) - before >= 2 * loop_watch.STOOD_S


async def test_tasks_that_have_not_ended_are_counted() -> None:
    count = REGISTRY.get_sample_value
    with LoopWatch():
        before = count("tandem_event_loop_tasks") or 0
        tasks = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(3)]
        assert count("tandem_event_loop_tasks") == before + 3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert count("tandem_event_loop_tasks") == before


async def test_calls_that_the_metric_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "_MAX_CALLS", 2)
    watch, before = LoopWatch(), stood_s("other")
    for i in range(5):
        watch._call = f"file.py function_{i}:1"
        watch._stood(1.0, 0.0)
    assert stood_s("other") - before == 3.0


async def test_every_process_is_watched_while_it_serves() -> None:
    lifecycle = Lifecycle()

    async def nothing() -> None:
        await asyncio.sleep(0)

    def new_watches() -> set[threading.Thread]:
        found = {each for each in threading.enumerate() if each.name == "tandem-watch"}
        return found - before  # one of the test before may still be ending

    before: set[threading.Thread] = set()
    before = new_watches()
    running = asyncio.create_task(lifecycle.run(startup=nothing, drain=nothing, stop=nothing))
    await eventually(lambda: len(new_watches()) == 1)
    lifecycle.shut_down("the end of the test")
    await running
    await eventually(lambda: not new_watches())


async def test_a_loop_that_waits_for_a_core_stands_in_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_watch, "_waits", lambda frame: True)
    before = stood_s("no call")
    with LoopWatch() as watch:
        stand_still(watch)
        await eventually(lambda: stood_s("no call") > before)
