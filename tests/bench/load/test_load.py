import asyncio
from collections.abc import Iterator

import pytest

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.load.load import LoadPlan, LoadResult, LoadRun
from tandem.bench.load.metrics import summarize
from tandem.runtime.errors import ConfigError
from tests.bench.load.sse_server import Exchange, answer_in_full, serving


def requests(offsets_s: tuple[float, ...] | None = None) -> Iterator[PreparedRequest]:
    body = b'{"prompt": "x", "stream": true, "max_tokens": 2}'
    if offsets_s is not None:
        yield from (PreparedRequest(body, 2, offset_s) for offset_s in offsets_s)
        return
    while True:
        yield PreparedRequest(body, 2)


async def run_plan(
    url: str, plan: LoadPlan, offsets_s: tuple[float, ...] | None = None
) -> LoadResult:
    client = OpenAIClient(url)
    try:
        return await LoadRun(client, requests(offsets_s), plan).run()
    finally:
        client.close()


class Gate:
    """Holds answers back and counts how many wait at the same time."""

    def __init__(self, hold_until: int) -> None:
        self._hold_until = hold_until
        self._opened = asyncio.Event()
        self.num_waiting = 0
        self.max_waiting = 0

    async def answer(self, exchange: Exchange) -> None:
        self.num_waiting += 1
        self.max_waiting = max(self.max_waiting, self.num_waiting)
        if self.num_waiting >= self._hold_until:
            self._opened.set()
        await self._opened.wait()
        self.num_waiting -= 1
        await answer_in_full(exchange)


async def test_a_closed_loop_keeps_exactly_so_many_in_flight() -> None:
    gate = Gate(hold_until=4)
    async with serving(gate.answer) as server:
        result = await run_plan(server.url, LoadPlan(concurrency=4, num_requests=20))
        assert server.num_connections == 4
    assert gate.max_waiting == 4
    assert [record.index for record in result.records] == list(range(20))
    assert all(record.succeeded for record in result.records)
    assert not result.interrupted


async def test_a_closed_loop_stops_sending_at_its_duration() -> None:
    async with serving() as server:
        result = await run_plan(server.url, LoadPlan(concurrency=2, duration_s=0.1))
    assert result.records
    assert all(record.scheduled_s < 0.1 for record in result.records)
    assert all(record.succeeded for record in result.records)


async def test_an_open_loop_sends_on_schedule_whatever_the_server_does() -> None:
    gate = Gate(hold_until=10)
    async with serving(gate.answer) as server:
        plan = LoadPlan(request_rate=200.0, arrival="constant", num_requests=10)
        result = await run_plan(server.url, plan)
    assert gate.max_waiting == 10
    scheduled = [record.scheduled_s for record in result.records]
    assert scheduled == pytest.approx([index / 200 for index in range(10)])
    assert all(record.sent_s >= record.scheduled_s for record in result.records)


async def test_waiting_for_the_in_flight_bound_counts_as_latency() -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await answer_in_full(exchange)

    async with serving(slow) as server:
        plan = LoadPlan(request_rate=1000.0, arrival="constant", num_requests=4, max_in_flight=1)
        result = await run_plan(server.url, plan)
        assert server.num_connections == 1
    *_, last = result.records
    assert last.scheduled_s == pytest.approx(0.003)
    assert last.sent_s >= 0.14
    spreads = summarize(result.records, {}).latencies_ms
    assert spreads["ttft"].max >= 180
    assert spreads["send_delay"].max >= 130
    assert spreads["ttft_from_sent"].max < spreads["ttft"].max


async def test_a_trace_is_replayed_at_its_own_arrivals() -> None:
    async with serving() as server:
        result = await run_plan(server.url, LoadPlan(), offsets_s=(0.0, 0.01, 0.01, 0.05))
    assert [record.scheduled_s for record in result.records] == [0.0, 0.01, 0.01, 0.05]


async def test_an_open_loop_without_a_rate_or_arrivals_is_refused() -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match="request rate"):
            await run_plan(server.url, LoadPlan(num_requests=3))


@pytest.mark.parametrize(
    "plan", [LoadPlan(concurrency=3), LoadPlan(request_rate=500.0, arrival="constant")]
)
async def test_a_stopped_run_keeps_what_it_measured(plan: LoadPlan) -> None:
    num_seen = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen > 5:
            while run.num_finished < 5:  # in an open loop the sixth can overtake them
                await asyncio.sleep(0.001)
            run.stop()
            await asyncio.Event().wait()
        await answer_in_full(exchange)

    async with serving(answer) as server:
        client = OpenAIClient(server.url)
        run = LoadRun(client, requests(), plan)
        result = await run.run()
        client.close()
    assert result.interrupted
    assert sum(record.succeeded for record in result.records) == 5
    assert any(record.unfinished for record in result.records)
    summary = summarize(result.records, {})
    assert summary.num_unfinished == len(result.records) - 5
    assert not summary.errors


@pytest.mark.parametrize(
    "limits",
    [
        {"concurrency": 2, "request_rate": 3.0},
        {"concurrency": 0},
        {"request_rate": -1.0},
        {"concurrency": 1, "num_requests": 0},
        {"concurrency": 1, "duration_s": 0.0},
    ],
)
def test_a_plan_that_cannot_be_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LoadPlan(**limits)  # type: ignore[arg-type]
