"""Workers and a frontend that die, stop, and come back: the same tokens, and no hang."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tandem.worker.worker import EXIT_DEVICE_LOST
from tests.e2e.cluster import Answer, Cluster
from tests.services import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

FLAGS = ("--disagg.claim_timeout_ms=3000",)
# a worker's start takes longer than the default on a loaded machine
FRONTEND_FLAGS = ("--frontend.migration_wait_s=40", "--frontend.return_wait_s=40")
NOTICE_S = 3.0
LOSING_WORKER = Path(__file__).with_name("losing_worker.py")
SLACK_S = 12.0  # a loaded machine


@contextmanager
def stopped(cluster: Cluster, name: str) -> Iterator[None]:
    cluster.send_signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.send_signal(name, signal.SIGCONT)


async def num_begun(cluster: Cluster) -> float:
    """How many answers have had a first token, as the frontend counts them."""
    text = (await cluster.get("/metrics")).body["text"]
    lines = [line for line in text.splitlines() if line.startswith("tandem_frontend_prefill_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


STORY = {"max_tokens": 700, "ignore_eos": True, "temperature": 0.9, "seed": 5}


async def begun(cluster: Cluster, *prompts: list[int]) -> list[asyncio.Task[Answer]]:
    """A story for each prompt, the first one streamed; all have had their first token."""
    num_before = await num_begun(cluster)
    asking = [
        asyncio.create_task(cluster.complete(prompt, stream=prompt is prompts[0], **STORY))
        for prompt in prompts
    ]

    async def have_begun() -> bool:
        return await num_begun(cluster) == num_before + len(prompts)

    await eventually(have_begun)
    return asking


async def is_unhealthy(cluster: Cluster) -> bool:
    return (await cluster.get("/health")).status == 503


async def is_idle(cluster: Cluster) -> bool:
    return all(worker.load.num_running == 0 for worker in await cluster.statuses("decode"))


@pytest.mark.parametrize(("name", "is_noticed"), [("decode0", is_unhealthy), ("frontend", is_idle)])
async def test_a_pause_is_noticed_within_three_seconds_and_costs_a_pause_and_nothing_else(
    cluster: Cluster, name: str, is_noticed: Callable[[Cluster], Awaitable[bool]]
) -> None:
    """For the answer that runs, and for a request that comes meanwhile."""
    undisturbed = await cluster.complete([5, 6], **STORY)
    asking = await begun(cluster, [5, 6])
    stopped_at = time.perf_counter()
    with stopped(cluster, name):
        await eventually(partial(is_noticed, cluster))
        assert time.perf_counter() - stopped_at < NOTICE_S + SLACK_S
        asking.append(asyncio.create_task(cluster.complete([8], max_tokens=12)))
    running, new = await asyncio.gather(*asking)
    assert running.text == undisturbed.text
    assert not any("error" in chunk for chunk in running.chunks)
    assert new.status == 200
    await cluster.ready(1, 1)
    await cluster.balanced()


async def test_the_answers_of_the_only_decode_worker_go_on_at_the_one_that_replaces_it(
    cluster: Cluster,
) -> None:
    undisturbed = [await cluster.complete([5, last], **STORY) for last in (6, 7)]
    asking = await begun(cluster, [5, 6], [5, 7])
    cluster.send_signal("decode0", signal.SIGKILL)
    await eventually(partial(is_unhealthy, cluster))
    new = asyncio.create_task(cluster.complete([5], max_tokens=1))
    await cluster.end("decode0")
    await cluster.start("decode1", "decode")
    answers = await asyncio.gather(*asking)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert (await new).status == 200
    await cluster.ready(1, 1)
    await cluster.remote_works()


async def test_a_decode_worker_that_loses_its_device_ends_and_its_answers_go_on_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    undisturbed = [await cluster.complete([5, last], **options) for last in range(10, 16)]
    await cluster.start("losing", "decode", entry=(str(LOSING_WORKER), str(tmp_path)))
    await cluster.registered("losing")
    losing = cluster.children["losing"]

    async def ask(index: int) -> None:
        while losing.exit_code is None:
            answer = await cluster.complete([5, 10 + index], **options)
            assert answer.text == undisturbed[index].text

    async def has_answers() -> bool:
        return any(
            status.load.num_running and status.instance.pid == losing.pid
            for status in await cluster.statuses("decode")
        )

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for index in range(6):
            group.create_task(ask(index))
        await eventually(has_answers)
        (tmp_path / "lost").touch()
    assert losing.exit_code == EXIT_DEVICE_LOST
    await cluster.end("losing")
    await cluster.ready(1, 1)


async def test_no_block_is_lost_in_all_of_this(cluster: Cluster) -> None:
    await cluster.balanced()
