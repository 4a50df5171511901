"""The default topology, workers of both roles, under load: no ticket is lost on the way."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tandem.queue.config import QueueConfig
from tandem.queue.jetstream import JetStreamQueue
from tandem.queue.prefill_queue import QueueDepth
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.process.lifecycle import started
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_CALLERS = 10
NUM_REQUESTS = 25  # of each
LENGTHS = (5, 60, 300, 1200)  # tokens of a prompt
# A caller's ticket is claimed as soon as a worker has room, however long that takes here.
PATIENCE = ("--disagg.claim_timeout_ms=60000", "--disagg.handoff_timeout_ms=120000")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await cluster.start("frontend", "frontend")
        for number in range(2):
            await cluster.start(f"worker{number}", "worker", *PATIENCE)
        await cluster.ready(2, 2)
        yield cluster


async def depth(cluster: Cluster) -> QueueDepth:
    [deployment] = {each.deployment for each in await cluster.instances() if each.deployment}
    async with (
        started(NatsConnection(cluster.runtime)) as connection,
        started(
            JetStreamQueue(connection, QueueConfig(), "test", cluster.model_name, deployment)
        ) as queue,
    ):
        return await queue.depth()


async def call(cluster: Cluster, caller: int, reasons: Counter[str]) -> None:
    """Ask for one answer after another; a third of the prompts must be computed elsewhere."""
    draw = random.Random(caller)
    for number in range(NUM_REQUESTS):
        prompt = [draw.randrange(3, 300) for _ in range(draw.choice(LENGTHS))]
        must_go = number % 3 == 0
        headers = {"x-tandem-prefill": "remote"} if must_go else {}
        answer = await cluster.complete(prompt, max_tokens=draw.randrange(1, 24), headers=headers)
        assert answer.status == 200, answer
        if must_go:
            reasons[answer.headers["x-tandem-prefill-reason"]] += 1


async def test_busy_workers_that_give_tickets_back_bury_and_lose_none(cluster: Cluster) -> None:
    reasons: Counter[str] = Counter()  # of the prompts that must be computed elsewhere
    await asyncio.gather(*(call(cluster, caller, reasons) for caller in range(NUM_CALLERS)))
    assert reasons.total() == NUM_CALLERS * len(range(0, NUM_REQUESTS, 3))
    del reasons["no prefill worker has reported its load lately"]  # on a machine with other work
    assert list(reasons) == ["asked for by the request"]
    await cluster.balanced()
    while (at_end := await depth(cluster)).num_jobs or at_end.num_in_progress:
        await asyncio.sleep(0.05)
    assert at_end == QueueDepth(0, 0, 0, 0)
