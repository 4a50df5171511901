"""A custom router: its own cost function, between a frontend and workers that cache prompts.

    cd examples/custom_router
    tandem run custom_router:Frontend --Router.load_weight=0.5
    python client.py                        # in another terminal

The workers have no model. Like an engine's prefix cache, they remember the blocks of prompts, and
publish them to the router.
"""

import asyncio
from collections.abc import AsyncIterator

from pydantic import BaseModel

from tandem.runtime.wire.block_hash import block_hashes
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
    """The request of every service in this example."""

    token_ids: list[int]


class Done(BaseModel):
    """The result of a prompt: its worker and its cached blocks."""

    worker_id: str
    num_blocks: int
    num_cached_blocks: int


@service(dynamo={"namespace": "routed"}, workers=2)
class Worker:
    """A worker that takes 10 ms for each block that is not cached."""

    def __init__(self) -> None:
        self.worker_id = dynamo_context["instance_id"]
        self.cached: set[bytes] = set()
        self.num_running = 0
        self.events = KvEventPublisher(dynamo_context["component"], kv_block_size=BLOCK_SIZE)
        self.metrics = KvMetricsPublisher()
        self.metrics.create_endpoint(dynamo_context["component"])
        self.publish_load()

    def publish_load(self) -> None:
        """Publish the load to routers; the first report makes this worker a candidate."""
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
        """Put the full blocks of a prompt into the cache, and publish them."""
        self.cached.update(hashes)
        num_tokens = len(hashes) * BLOCK_SIZE
        self.events.publish_stored(token_ids[:num_tokens], block_hashes=hashes)


class RouterSettings(BaseModel):
    """The settings of `--Router.key=value`."""

    load_weight: float = 1.0  # the cost of a busy worker, as a share of the prompt's blocks


@service(dynamo={"namespace": "routed"}, settings=RouterSettings)
class Router:
    """A router that yields the id of the best worker for a prompt."""

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
    """Return the worker with the least cost: missing blocks of the prompt, and load.

    Return "" if no worker has reported its load.
    """
    num_blocks = num_tokens // BLOCK_SIZE
    costs = {
        worker.worker_id: (
            num_blocks
            - scores.scores.get(worker.worker_id, 0)
            + load_weight * num_blocks * worker.request_active_slots / worker.request_total_slots,
            worker.kv_active_blocks,  # among equals, prefer the emptier cache
        )
        for worker in metrics.endpoints
    }
    return min(costs, key=lambda worker_id: costs[worker_id], default="")


@service(dynamo={"namespace": "routed"})
class Frontend:
    """The entry for clients: it asks the router, then calls the chosen worker."""

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
