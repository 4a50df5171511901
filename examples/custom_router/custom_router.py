"""A router with a cost function of its own, between a frontend and workers that cache prompts.

    cd examples/custom_router
    tandem run custom_router:Frontend --Router.load_weight=0.5
    python client.py                        # in another terminal

The workers have no model: they remember which blocks of prompts they have seen, as an engine's
prefix cache does, and tell the router.
"""

import asyncio
from collections.abc import AsyncIterator

from pydantic import BaseModel

from tandem.runtime.block_hash import block_hashes
from tandem.sdk import (
    AggregatedMetrics,
    KvEventPublisher,
    KvIndexer,
    KvMetricsAggregator,
    KvMetricsPublisher,
    OverlapScores,
    async_on_start,
    depends,
    dynamo_context,
    endpoint,
    service,
)

BLOCK_SIZE = 16  # tokens
NUM_SLOTS = 8


class Prompt(BaseModel):
    """What every service of this example takes."""

    token_ids: list[int]


class Done(BaseModel):
    """What a worker did with a prompt."""

    worker_id: str
    num_blocks: int
    num_cached_blocks: int


@service(dynamo={"namespace": "routed"}, workers=2)
class Worker:
    """Takes 10 ms for each block that it does not have yet."""

    def __init__(self) -> None:
        self.worker_id = dynamo_context["instance_id"]
        self.cached: set[bytes] = set()
        self.num_running = 0
        self.events = KvEventPublisher(dynamo_context["component"], kv_block_size=BLOCK_SIZE)
        self.metrics = KvMetricsPublisher()
        self.metrics.create_endpoint(dynamo_context["component"])
        self.publish_load()

    def publish_load(self) -> None:
        """Tells routers how busy this worker is; the first time makes it a candidate."""
        used = len(self.cached)
        self.metrics.publish(self.num_running, NUM_SLOTS, used, 1024, 0, used / 1024, 0.0)

    @endpoint()
    async def generate(self, request: Prompt) -> AsyncIterator[Done]:
        self.num_running += 1
        self.publish_load()
        try:
            hashes = block_hashes(request.token_ids, BLOCK_SIZE)
            new = [each for each in hashes if each not in self.cached]
            await asyncio.sleep(0.01 * len(new))
            self.remember(request.token_ids, hashes)
            yield Done(
                worker_id=self.worker_id,
                num_blocks=len(hashes),
                num_cached_blocks=len(hashes) - len(new),
            )
        finally:
            self.num_running -= 1
            self.publish_load()

    def remember(self, token_ids: list[int], hashes: list[bytes]) -> None:
        """Puts the full blocks of a prompt into the cache, and tells routers."""
        self.cached.update(hashes)
        num_tokens = len(hashes) * BLOCK_SIZE
        self.events.publish_stored(token_ids[:num_tokens], block_hashes=hashes)


class RouterSettings(BaseModel):
    """What `--Router.key=value` may set."""

    load_weight: float = 1.0  # how many cached blocks a worker that is all busy must have more


@service(dynamo={"namespace": "routed"}, settings=RouterSettings)
class Router:
    """Yields the id of the worker that should take a prompt."""

    @async_on_start
    async def follow_workers(self) -> None:
        workers = dynamo_context["runtime"].namespace("routed").component("Worker")
        await workers.create_service()
        self.indexer = KvIndexer(workers, BLOCK_SIZE)
        self.aggregator = KvMetricsAggregator(workers)
        self.settings: RouterSettings = dynamo_context["config"]

    @endpoint()
    async def choose(self, request: Prompt) -> AsyncIterator[str]:
        scores = await self.indexer.find_matches_for_request(request.token_ids)
        metrics = await self.aggregator.get_metrics()
        yield cheapest(scores, metrics, len(request.token_ids), self.settings.load_weight)


def cheapest(
    scores: OverlapScores, metrics: AggregatedMetrics, num_tokens: int, load_weight: float
) -> str:
    """The worker with the least left to do: blocks it lacks, and what it has at hand.

    Empty where no worker tells its load yet.
    """
    num_blocks = num_tokens // BLOCK_SIZE
    costs = {
        worker.worker_id: (
            num_blocks
            - scores.scores.get(worker.worker_id, 0)
            + load_weight * num_blocks * worker.request_active_slots / worker.request_total_slots,
            worker.kv_active_blocks,  # among equals the one with the emptier cache
        )
        for worker in metrics.endpoints
    }
    return min(costs, key=lambda worker_id: costs[worker_id], default="")


@service(dynamo={"namespace": "routed"})
class Frontend:
    """What clients call: asks the router, then the worker that it named."""

    router = depends(Router)
    worker = depends(Worker)

    @endpoint()
    async def generate(self, request: Prompt) -> AsyncIterator[dict[str, object]]:
        worker_id = await anext(self.router.choose(request))
        if worker_id:
            answer = self.worker.generate.direct(request, worker_id)
        else:
            answer = self.worker.generate(request)
        async for done in answer:
            yield done
