"""Workers and services that die, stop, and come back: same tokens or a clean error, no hang."""

import asyncio
import random
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

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ("--disagg.claim_timeout_ms=3000",)
# a worker's start takes longer than the default on a loaded machine
FRONTEND_FLAGS = ("--frontend.migration_wait_s=40", "--frontend.return_wait_s=40")
LONG = 1500  # prompt tokens: long enough to be caught in the act
BRIEF = 100
ASK_PAUSE_S = 0.2  # between answers that show what the cluster does meanwhile
NOTICE_S = 3.0
LOSING_WORKER = Path(__file__).with_name("losing_worker.py")
SLACK_S = 12.0  # a loaded machine


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 1000) for _ in range(num_tokens)]


async def ask(cluster: Cluster, seed: int, place: str, num_tokens: int = BRIEF) -> Answer:
    return await cluster.complete(
        prompt(seed, num_tokens),
        max_tokens=12,
        temperature=0,
        cache_salt=f"{place} {seed} {time.monotonic_ns()}",
        headers={"x-tandem-prefill": place},
    )


@contextmanager
def stopped(cluster: Cluster, name: str) -> Iterator[None]:
    cluster.send_signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.send_signal(name, signal.SIGCONT)


async def caught_in_the_act(cluster: Cluster, seed: int) -> asyncio.Task[Answer]:
    """A long prompt that a prefill worker computes now. On a fast machine it takes some tries."""
    while True:
        asking = asyncio.create_task(ask(cluster, seed, "remote", LONG))
        while not asking.done():
            if any(w.details["num_jobs"] for w in await cluster.statuses("prefill")):
                return asking
        assert (await asking).place == "remote"


async def remote_works(cluster: Cluster) -> None:
    async def is_remote() -> bool:
        answer = await ask(cluster, 1, "remote")
        assert answer.status == 200
        return answer.place == "remote"

    await eventually(is_remote, pause_s=ASK_PAUSE_S)


async def test_the_end_of_a_prefill_worker_costs_time_and_nothing_else(cluster: Cluster) -> None:
    undisturbed = await ask(cluster, 5, "local", LONG)
    asking = await caught_in_the_act(cluster, 5)
    cluster.send_signal("prefill0", signal.SIGKILL)
    answer = await asking
    assert (answer.status, answer.text) == (200, undisturbed.text)
    await cluster.end("prefill0")
    await cluster.start("prefill0", "prefill", *FLAGS)
    await cluster.ready(1, 1)
    await remote_works(cluster)
    await cluster.balanced()


async def test_losing_nats_keeps_streams_going_and_prompts_local(cluster: Cluster) -> None:
    streaming = asyncio.create_task(
        cluster.complete([5, 6, 7], max_tokens=2000, ignore_eos=True, stream=True, temperature=0)
    )
    undisturbed = await ask(cluster, 6, "local")
    child = cluster.nats.child
    child.kill()
    await child.wait()

    async def is_local() -> bool:
        answer = await ask(cluster, 6, "remote")
        assert (answer.status, answer.text) == (200, undisturbed.text)
        return answer.place == "local"

    await eventually(is_local, pause_s=ASK_PAUSE_S)
    await cluster.nats.restart(empty=True)
    await remote_works(cluster)
    streamed = await streaming
    assert streamed.status == 200 and streamed.chunks[-1]["choices"][0]["finish_reason"] == "length"
    await cluster.balanced()


async def test_losing_etcd_stops_nothing_and_everyone_comes_back(cluster: Cluster) -> None:
    child = cluster.etcd.child
    child.kill()
    await child.wait()
    for place in ("local", "remote"):
        answer = await ask(cluster, 7, place)
        assert (answer.status, answer.place) == (200, place)
    await cluster.etcd.restart(empty=True)
    await cluster.ready(1, 1)
    await cluster.set_config("disagg.max_local_prefill_length", 900)
    await remote_works(cluster)


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


@pytest.mark.slow
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
        asking.append(asyncio.create_task(ask(cluster, 8, "local")))
    running, new = await asyncio.gather(*asking)
    assert running.text == undisturbed.text
    assert not any("error" in chunk for chunk in running.chunks)
    assert new.status == 200
    await cluster.ready(1, 1)
    await cluster.balanced()


@pytest.mark.slow
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
    await remote_works(cluster)


@pytest.mark.slow
async def test_a_decode_worker_that_loses_its_device_ends_and_its_answers_go_on_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    undisturbed = [await cluster.complete([5, last], **options) for last in range(10, 16)]
    entry = (str(LOSING_WORKER), str(tmp_path))
    await cluster.start("losing", "decode", entry=entry)
    await cluster.registered("losing")
    asking = [asyncio.create_task(cluster.complete([5, last], **options)) for last in range(10, 16)]

    async def has_computed() -> bool:
        return (tmp_path / "computed").exists()

    await eventually(has_computed)
    (tmp_path / "lost").touch()
    answers = await asyncio.gather(*asking)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]

    async def has_ended() -> bool:
        return cluster.children["losing"].exit_code is not None

    await eventually(has_ended)
    assert cluster.children["losing"].exit_code == EXIT_DEVICE_LOST
    await cluster.end("losing")
    await cluster.ready(1, 1)


async def test_no_block_is_lost_in_all_of_this(cluster: Cluster) -> None:
    await cluster.balanced()
