"""The load itself: requests sent in a closed or an open loop, and stopped early when asked."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.record import RequestRecord
from tandem.runtime.clock import wall_seconds
from tandem.runtime.errors import ConfigError

Arrival = Literal["poisson", "constant"]

SPIN_S = 1.5e-3  # event loop timers tick in milliseconds; the rest of a wait is spent yielding
MAX_WARM_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The order in which requests follow one another.

    Closed loop: `concurrency`. Open loop: `request_rate` per second, or neither when every
    request brings its own offset (a trace). The run ends when its requests, `num_requests` or
    `duration_s` are used up, whichever is first; requests in flight then are waited for.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    arrival: Arrival = "poisson"
    num_requests: int | None = None
    duration_s: float | None = None
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.request_rate is not None:
            raise ConfigError("choose a concurrency (closed loop) or a request rate (open loop)")
        limits = (self.concurrency, self.request_rate, self.num_requests, self.max_in_flight)
        if any(limit is not None and limit <= 0 for limit in (*limits, self.duration_s)):
            raise ConfigError("concurrency, rate, requests, duration, in-flight: above 0")

    @property
    def is_closed_loop(self) -> bool:
        return self.concurrency is not None


@dataclass(slots=True)
class LoadResult:
    """The records of a run. `client_cpu_s` is this process's CPU time during the run."""

    records: list[RequestRecord] = field(default_factory=list)
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    num_reconnects: int = 0
    interrupted: bool = False


class LoadRun:
    """One run of a plan against one client."""

    def __init__(
        self,
        client: OpenAIClient,
        requests: Iterator[PreparedRequest],
        plan: LoadPlan,
        seed: int = 0,
    ) -> None:
        self._client = client
        self._plan = plan
        self._requests = itertools.islice(requests, plan.num_requests)
        self._seed = seed
        self._in_flight: dict[asyncio.Task[None], RequestRecord] = {}
        self._origin_s = 0.0
        self._stopping = asyncio.Event()
        self.records: list[RequestRecord] = []  # in the order in which they were due
        self.num_finished = 0
        self.num_failed = 0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._origin_s

    @property
    def num_in_flight(self) -> int:
        return len(self.records) - self.num_finished

    def stop(self) -> None:
        """End the run now; requests in flight become unfinished."""
        self._stopping.set()

    async def run(self) -> LoadResult:
        """Send everything. Raises ExchangeError when the server takes no connection at all."""
        plan = self._plan
        await self._client.pool.warm(min(plan.concurrency or 1, MAX_WARM_CONNECTIONS))
        self._origin_s = time.perf_counter()
        cpu_s = time.process_time()
        work = asyncio.create_task(
            self._closed_loop() if plan.is_closed_loop else self._open_loop()
        )
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [work, stopped, *self._in_flight]
            interrupted = not work.done()
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return LoadResult(
            self.records,
            self.elapsed_s,
            time.process_time() - cpu_s,
            self._client.pool.num_reconnects,
            interrupted,
        )

    async def _closed_loop(self) -> None:
        assert self._plan.concurrency is not None
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._plan.concurrency):
                slots.create_task(self._slot())

    async def _slot(self) -> None:
        for request in self._requests:  # built before its scheduled time is read
            now_s = self.elapsed_s
            if self._is_over(now_s):
                return
            await self._send(request, self._add_record(now_s))

    async def _open_loop(self) -> None:
        plan = self._plan
        bound = asyncio.Semaphore(plan.max_in_flight) if plan.max_in_flight else None
        for request, offset_s in self._arrivals():
            if self._is_over(offset_s):
                break
            await self._wait_until(offset_s)
            record = self._add_record(offset_s)
            if bound is not None:
                await bound.acquire()
            task = asyncio.create_task(self._send(request, record))
            self._in_flight[task] = record
            task.add_done_callback(self._in_flight.__delitem__)
            if bound is not None:
                task.add_done_callback(lambda _: bound.release())
        if self._in_flight:
            await asyncio.wait(tuple(self._in_flight))

    def _arrivals(self) -> Iterator[tuple[PreparedRequest, float]]:
        rate = self._plan.request_rate
        if rate is not None:
            yield from zip(
                self._requests,
                arrival_offsets_s(rate, self._plan.arrival, self._seed),
                strict=False,
            )
            return
        for request in self._requests:
            if request.offset_s is None:
                raise ConfigError("an open loop needs a request rate, or a trace's own arrivals")
            yield request, request.offset_s

    async def _send(self, request: PreparedRequest, record: RequestRecord) -> None:
        await self._client.send(request, record, self._origin_s)
        record.unfinished = False
        self.num_finished += 1
        self.num_failed += bool(record.error)

    def _add_record(self, scheduled_s: float) -> RequestRecord:
        record = RequestRecord(len(self.records), scheduled_s, unfinished=True)
        self.records.append(record)
        return record

    def _is_over(self, at_s: float) -> bool:
        return self._plan.duration_s is not None and at_s >= self._plan.duration_s

    async def _wait_until(self, offset_s: float) -> None:
        while (left_s := offset_s - self.elapsed_s) > 0:
            await asyncio.sleep(max(left_s - SPIN_S / wall_seconds(1), 0))


def arrival_offsets_s(rate: float, arrival: Arrival, seed: int) -> Iterator[float]:
    """Yield the seconds after the start at which requests are due, at `rate` per second.

    The first is due at once. Poisson draws exponential gaps from `seed` alone.
    """
    if not rate > 0:
        raise ValueError(f"request rate must be above 0 per second, not {rate:g}")
    draws = random.Random(f"arrivals/{seed}")
    offset_s = 0.0
    while True:
        yield offset_s
        offset_s += draws.expovariate(rate) if arrival == "poisson" else 1 / rate
