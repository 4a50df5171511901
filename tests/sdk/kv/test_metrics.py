"""What workers publish of their load, and routers collect."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tandem.runtime.bus.events import kv_subject, load_subject
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.wire.cluster_messages import LoadReport
from tandem.sdk import (
    DistributedRuntime,
    KvIndexer,
    KvMetrics,
    KvMetricsAggregator,
    KvMetricsPublisher,
    WorkerMetricsPublisher,
)
from tandem.sdk.kv.metrics import metrics_subject
from tests.sdk.kit_pair import Pair
from tests.services import MonitoredNatsServer, eventually

NUMBERS = (3, 1024, 70, 100, 2, 0.7, 0.25)


@pytest.fixture
async def aggregator(pair: Pair) -> AsyncIterator[KvMetricsAggregator]:
    aggregator = KvMetricsAggregator(pair.caller.namespace("a").component("b"))
    yield aggregator
    await aggregator.close()


@pytest.fixture
async def publisher(pair: Pair) -> AsyncIterator[KvMetricsPublisher]:
    """Has its endpoint; has published nothing."""
    publisher = KvMetricsPublisher()
    await publisher.create_endpoint(pair.worker.namespace("a").component("b"))
    yield publisher
    await publisher.close()


async def until(aggregator: KvMetricsAggregator, expected: list[KvMetrics]) -> None:
    async with asyncio.timeout(60):
        while (await aggregator.get_metrics()).endpoints != expected:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_what_a_worker_publishes_is_what_a_router_gets(
    pair: Pair, aggregator: KvMetricsAggregator, is_awaited: bool
) -> None:
    assert (await aggregator.get_metrics()).endpoints == []
    publisher = KvMetricsPublisher()
    opening = publisher.create_endpoint(pair.worker.namespace("a").component("b"))
    if is_awaited:
        await opening
    publisher.publish(*NUMBERS)
    mine = KvMetrics(pair.worker.instance_id, *NUMBERS)
    await until(aggregator, [mine])
    assert mine.kv_total_blocks == 100 and mine.gpu_prefix_cache_hit_rate == 0.25
    publisher.publish(4, *NUMBERS[1:])
    await until(aggregator, [KvMetrics(mine.worker_id, 4, *NUMBERS[1:])])
    await publisher.close()
    await until(aggregator, [])


async def test_a_late_router_asks_and_need_not_wait_for_a_report(
    pair: Pair, publisher: KvMetricsPublisher
) -> None:
    publisher.publish(*NUMBERS)
    late = KvMetricsAggregator(pair.caller.namespace("a").component("b"))
    assert (await late.get_metrics()).endpoints == [KvMetrics(pair.worker.instance_id, *NUMBERS)]
    await late.close()


async def test_a_worker_that_published_nothing_is_no_candidate(
    pair: Pair, aggregator: KvMetricsAggregator, publisher: KvMetricsPublisher
) -> None:
    client = await pair.caller.endpoint("a.b.load_metrics").client()
    await client.wait_for_instances(10)
    assert (await aggregator.get_metrics()).endpoints == []
    with pytest.raises(UnavailableError):
        async for _ in await client.direct({}, pair.worker.instance_id):
            pass
    publisher.publish(0, 1024, 0, 1024, 0, 0.0, 0.0)
    answer = [item async for item in await client.generate({}, annotated=False)]
    assert answer == [
        {
            "worker_id": pair.worker.instance_id, "request_active_slots": 0,
            "request_total_slots": 1024, "kv_active_blocks": 0, "kv_total_blocks": 1024,
            "num_requests_waiting": 0, "gpu_cache_usage_perc": 0.0,
            "gpu_prefix_cache_hit_rate": 0.0,
        }
    ]  # fmt: skip
    await client.close()


async def test_several_workers_are_distinguished_and_leave_one_by_one(
    pair: Pair, aggregator: KvMetricsAggregator
) -> None:
    async with DistributedRuntime(pair.worker.config) as second:
        runtimes = [pair.worker, second]
        expected = []
        for number, runtime in enumerate(runtimes):
            publisher = KvMetricsPublisher()
            publisher.create_endpoint(runtime.namespace("a").component("b"))
            publisher.publish(number, *NUMBERS[1:])
            expected.append(KvMetrics(runtime.instance_id, number, *NUMBERS[1:]))
        await until(aggregator, sorted(expected, key=lambda each: each.worker_id))
    await until(aggregator, [expected[0]])


async def test_a_worker_without_a_report_is_asked(
    pair: Pair,
    aggregator: KvMetricsAggregator,
    publisher: KvMetricsPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.publish(*NUMBERS)
    await until(aggregator, [KvMetrics(pair.worker.instance_id, *NUMBERS)])
    monkeypatch.setattr(pair.worker.events, "publish", lambda *_: None)
    publisher.publish(9, *NUMBERS[1:])
    monkeypatch.setattr("tandem.sdk.kv.aggregator._STALE_S", 0.0)
    # Not at once: the report of before may come after the first answer.
    await until(aggregator, [KvMetrics(pair.worker.instance_id, 9, *NUMBERS[1:])])


async def test_frontends_get_the_load_as_of_any_worker(
    pair: Pair, publisher: KvMetricsPublisher
) -> None:
    reports: list[LoadReport] = []
    decode = msgspec.msgpack.Decoder(LoadReport).decode
    await pair.caller.events.subscribe(
        load_subject("a"), lambda _, payload: reports.append(decode(payload))
    )
    thread = threading.Thread(target=publisher.publish, args=NUMBERS)
    thread.start()
    thread.join()
    await eventually(lambda: bool(reports))
    worker = pair.worker
    assert reports[0] == LoadReport(worker.instance_id, worker.epoch, "decode", 3, 2, 0, 100, 30, 0)


async def test_blocks_are_added_up_over_ranks(pair: Pair, aggregator: KvMetricsAggregator) -> None:
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(pair.worker.endpoint("a.b.generate"))
    publisher.publish(0, 5)
    publisher.publish(1, 5, 7)
    await until(aggregator, [KvMetrics(pair.worker.instance_id, kv_active_blocks=12)])
    with pytest.raises(InvalidRequestError, match="active_decode_blocks"):
        publisher.publish(0)
    await publisher.close()


async def test_a_closed_follower_of_the_workers_is_no_subscriber(
    runtime_config: RuntimeConfig,
) -> None:
    with MonitoredNatsServer() as nats:
        config = runtime_config.model_copy(update={"nats_url": nats.url})
        async with DistributedRuntime(config) as caller:
            workers = caller.namespace("a").component("b")
            subjects = [kv_subject("a"), metrics_subject(workers)]

            async def are_subscribed(number: int) -> None:
                await eventually(
                    lambda: all(nats.num_subscriptions(each) == number for each in subjects)
                )

            pairs = [(KvIndexer(workers, 4), KvMetricsAggregator(workers)) for _ in range(3)]
            await are_subscribed(3)
            for num_left in (2, 1, 0):
                for follower in pairs[num_left]:
                    await follower.close()
                await are_subscribed(num_left)


async def test_numbers_that_are_none_are_named(pair: Pair, publisher: KvMetricsPublisher) -> None:
    wrong: list[tuple[int, Any, str]] = [
        (0, -1, "request_active_slots"),
        (3, 0.5, "kv_total_blocks"),
        (5, "high", "gpu_cache_usage_perc"),
        (6, float("nan"), "gpu_prefix_cache_hit_rate"),
    ]
    for position, value, name in wrong:
        numbers = list(NUMBERS)
        numbers[position] = value
        with pytest.raises(InvalidRequestError, match=name):
            publisher.publish(*numbers)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="create_endpoint"):
        publisher.create_endpoint(pair.worker.namespace("a").component("b"))
