"""A router as its author writes it: an ordinary worker with a cost function of its own."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tandem.runtime.bus.events import kv_subject
from tandem.runtime.config import RuntimeConfig
from tandem.sdk import (
    AggregatedMetrics,
    Client,
    Component,
    DistributedRuntime,
    KvEventPublisher,
    KvIndexer,
    KvMetricsAggregator,
    KvMetricsPublisher,
    OverlapScores,
    Responses,
)
from tandem.sdk.kv.metrics import metrics_subject
from tests.sdk.kit_pair import Pair
from tests.services import MonitoredNatsServer, eventually

BLOCK = 4


class Worker:
    """Holds every prompt it was given; its load is what the test says."""

    def __init__(self, component: Component) -> None:
        self.worker_id = component.runtime.instance_id
        self.events = KvEventPublisher(component, self.worker_id, BLOCK)
        self.metrics = KvMetricsPublisher()
        self.metrics.create_endpoint(component)
        self.load(0)

    def load(self, num_waiting: int) -> None:
        self.metrics.publish(0, 8, 0, 100, num_waiting, 0.0, 0.0)

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[str]:
        tokens = request["tokens"]
        hashes = [hash(tuple(tokens[: end + BLOCK])) for end in range(0, len(tokens), BLOCK)]
        self.events.publish_stored(tokens, None, hashes)
        yield self.worker_id


class Router:
    """Longest prefix against the longest queue."""

    def __init__(self, workers: Component) -> None:
        self.indexer = KvIndexer(workers, BLOCK)
        self.aggregator = KvMetricsAggregator(workers)

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[str]:
        scores = await self.indexer.find_matches_for_request(request["tokens"])
        yield self.choose(scores, await self.aggregator.get_metrics(), len(request["tokens"]))

    def choose(self, scores: OverlapScores, metrics: AggregatedMetrics, num_tokens: int) -> str:
        most_waiting = max((each.num_requests_waiting for each in metrics.endpoints), default=0)
        values = {
            each.worker_id: 2
            * scores.scores.get(each.worker_id, 0)
            * self.indexer.block_size()
            / num_tokens
            - each.gpu_cache_usage_perc
            - each.num_requests_waiting / max(1, most_waiting)
            for each in metrics.endpoints
        }
        return max(sorted(values), key=lambda each: values[each], default="")

    async def close(self) -> None:
        await self.indexer.close()
        await self.aggregator.close()


async def routed(router: Client, workers: Client, tokens: Sequence[int]) -> str:
    """A prompt's way: the router names a worker, the client calls it."""
    named = await only(await router.generate({"tokens": tokens}, annotated=False))
    return await only(await workers.direct({"tokens": tokens}, named, annotated=False))


async def only(answer: Responses) -> str:
    [item] = [each async for each in answer]
    assert isinstance(item, str)
    return item


async def test_prompts_go_where_their_prefix_is_unless_that_worker_is_busy(pair: Pair) -> None:
    async with DistributedRuntime(pair.worker.config) as second:
        one = Worker(pair.worker.namespace("a").component("Worker"))
        workers = await pair.serve(one.generate, "a.Worker.generate")
        two = Worker(second.namespace("a").component("Worker"))
        two_endpoint = second.endpoint("a.Worker.generate")
        two_endpoint.serve(two.generate)
        await two_endpoint.register()
        await eventually(lambda: len(workers.instance_ids()) == 2)
        router = Router(pair.caller.namespace("a").component("Worker"))
        routers = await pair.serve(router.generate, "a.Router.generate")
        prompts = [[first] * 8 + list(range(8)) for first in range(20)]
        before = {}
        for worker, prompt in zip([one, two] * 10, prompts, strict=True):
            answer = await workers.direct({"tokens": prompt}, worker.worker_id, annotated=False)
            before[prompt[0]] = await only(answer)
        await eventually(lambda: router.indexer._follower.index.num_entries == 20 * 4)
        for prompt in prompts:
            longer = [*prompt, 5, 5, 5, 5]
            assert await routed(routers, workers, longer) == before[prompt[0]]
        assert set(before.values()) == {one.worker_id, two.worker_id}
        one.load(100)
        await eventually(lambda: _waiting(router, one.worker_id) == 100)
        assert await routed(routers, workers, [*prompts[0][:8], *[9] * 56]) == two.worker_id
        await router.close()


async def test_a_closed_follower_of_the_workers_is_no_subscriber(
    runtime_config: RuntimeConfig,
) -> None:
    with MonitoredNatsServer() as nats:
        config = runtime_config.model_copy(update={"nats_url": nats.url})
        async with DistributedRuntime(config) as caller:
            workers = caller.namespace("a").component("Worker")
            subjects = [kv_subject("a"), metrics_subject(workers)]
            routers = [Router(workers) for _ in range(3)]
            await eventually(lambda: [nats.num_subscriptions(each) for each in subjects] == [3, 3])
            for router in routers[1:]:
                await router.close()
            await eventually(lambda: [nats.num_subscriptions(each) for each in subjects] == [1, 1])
            await routers[0].close()
            await eventually(lambda: not any(map(nats.num_subscriptions, subjects)))


def _waiting(router: Router, worker_id: str) -> int:
    return router.aggregator._latest[worker_id][1].num_requests_waiting
