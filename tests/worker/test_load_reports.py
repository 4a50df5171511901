"""Load reports come by need: soon for prompts, often while the engine computes, else rarely."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import pytest

from tandem.engine.schedule.outputs import LoadStats
from tandem.runtime.tasks import cancel, keep_running
from tandem.worker import load_reports
from tandem.worker.load_reports import BURST_S, LONG_TOKENS, PLACING_S, LoadReports, OwnPrompts
from tests.services import eventually

NEVER_S = 3600.0
IDLE = LoadStats(
    0,
    num_running=0,
    num_waiting=0,
    num_remote=0,
    num_blocks=8,
    num_free_blocks=8,
    num_cached_blocks=0,
    num_quarantined_blocks=0,
    num_preemptions=0,
)


@dataclass
class Reporting:
    """Reports of an engine that has made `num_steps` steps."""

    prompts: OwnPrompts = field(default_factory=OwnPrompts)
    num_steps: int = 0
    is_busy: bool = False
    sent: list[LoadStats] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)  # when the engine was asked for its load

    async def __aenter__(self) -> "Reporting":
        reports = LoadReports(self.prompts, self.load, self.sent.append, self.progress)
        self.task = keep_running("reports", reports.send_next)
        await self.has_sent(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self.task)

    async def load(self) -> LoadStats:
        self.asked_s.append(asyncio.get_running_loop().time())
        return IDLE

    def progress(self) -> tuple[int, bool]:
        return self.num_steps, self.is_busy

    async def has_sent(self, number: int) -> None:
        await eventually(lambda: len(self.sent) >= number)


@pytest.fixture(autouse=True)
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_reports, "HEARTBEAT_S", NEVER_S)
    monkeypatch.setattr(load_reports, "INTERVAL_S", 0.03)


async def test_an_engine_that_computes_is_reported_often() -> None:
    async with Reporting(is_busy=True) as reporting:
        await reporting.has_sent(4)


async def test_an_engine_without_work_is_reported_at_its_first_prompt_and_at_long_ones() -> None:
    async with Reporting() as reporting:
        await asyncio.sleep(0.1)  # longer than the interval of an engine that computes
        assert len(reporting.sent) == 1
        reporting.prompts.add("first", 1)
        await reporting.has_sent(2)
        reporting.prompts.add("long", LONG_TOKENS)
        await reporting.has_sent(3)
        reporting.prompts.discard("first")
        reporting.prompts.discard("long")
        await reporting.has_sent(4)


async def test_a_prompt_is_placed_before_the_engine_is_asked_for_its_load() -> None:
    async with Reporting() as reporting:
        await asyncio.sleep(0.1)
        came_s = asyncio.get_running_loop().time()
        reporting.prompts.add("first", 1)
        await reporting.has_sent(2)
        assert reporting.asked_s[-1] - came_s > 0.9 * PLACING_S  # clocks round


async def test_heartbeats_tell_that_a_worker_without_work_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_reports, "HEARTBEAT_S", 0.05)
    async with Reporting() as reporting:
        await reporting.has_sent(4)


def test_prompts_that_just_came_count_without_the_one_that_is_decided() -> None:
    prompts = OwnPrompts()
    assert prompts.just_come("a") == (0, 0)
    for request_id, num_tokens in (("a", 1), ("b", 20), ("c", 300)):
        prompts.add(request_id, num_tokens)
    assert prompts.just_come("a") == (320, (20**2 + 300**2) / 2)
    burst = prompts._burst
    burst._came = deque((at - BURST_S, *rest) for at, *rest in burst._came)
    assert prompts.just_come("a") == (0, 0)
