"""Two hundred mixed requests at once: every one ends, nothing is left behind."""

import asyncio
import random

import aiohttp
import psutil
import pytest

from tests.e2e.cluster import Answer, Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_WORKERS = (2, 2)
NUM_REQUESTS = 200


async def one(cluster: Cluster, number: int) -> Answer | None:
    """A request of a kind that its number chooses; None for one that hangs up."""
    draw = random.Random(number)
    prompt = [draw.randrange(3, 1000) for _ in range(draw.choice((3, 30, 200)))]
    options: dict[str, object] = {
        "max_tokens": draw.randrange(1, 24),
        "temperature": draw.choice((0, 0.8)),
        "seed": number,
        "stream": bool(number % 2),
        "headers": {"x-tandem-prefill": "remote"} if number % 3 == 0 else {},
    }
    if number % 10 == 7:
        return await hang_up(cluster, prompt)
    if number % 10 == 9:
        return await cluster.complete(prompt, **{**options, "n": 2})
    if number % 20 == 4:
        return await cluster.complete(prompt, **{**options, "max_tokens": -1})
    return await cluster.complete(prompt, **options)


async def hang_up(cluster: Cluster, prompt: list[int]) -> None:
    body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": 500, "stream": True}
    body["ignore_eos"] = True
    async with cluster.http.post(cluster.base_url + "/v1/completions", json=body) as response:
        assert response.status == 200
        await response.content.readline()
        response.close()


async def test_every_one_of_two_hundred_requests_ends_and_the_pools_balance(
    cluster: Cluster,
) -> None:
    await cluster.set_config("disagg.policy", "threshold")
    await cluster.set_config("disagg.max_local_prefill_length", 100)
    answers = await asyncio.gather(*[one(cluster, number) for number in range(NUM_REQUESTS)])
    for number, answer in enumerate(answers):
        if number % 10 == 7:
            assert answer is None
        elif number % 20 == 4:
            assert answer is not None and answer.status == 400
        else:
            assert answer is not None and answer.status == 200, answer
            assert answer.place in ("local", "remote")
    await cluster.balanced()
    for worker in await cluster.statuses("decode"):
        assert worker.details["num_open_handoffs"] == 0
        assert worker.details["num_quarantined_blocks"] == 0
    async with asyncio.timeout(10):  # the frontend is through with a client that left a bit later
        while await num_inflight(cluster) > 0:
            await asyncio.sleep(0.05)


async def num_inflight(cluster: Cluster) -> float:
    """Requests in the frontend's hands, by its metrics."""
    metrics = (await cluster.get("/metrics")).body["text"].splitlines()
    inflight = [line for line in metrics if line.startswith("tandem_frontend_inflight_requests")]
    assert inflight
    return sum(float(line.split()[-1]) for line in inflight)


async def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd(cluster: Cluster) -> None:
    options = {"max_tokens": 20, "temperature": 0.8, "seed": 11}
    alone = await cluster.chat("Tell me a story about a cat.", **options)
    crowd = [cluster.chat("Tell me a story about a cat.", **options) for _ in range(8)]
    noise = [cluster.complete([number, 5, 6], max_tokens=20) for number in range(3, 20)]
    answers = await asyncio.gather(*crowd, *noise)
    assert {answer.text for answer in answers[:8]} == {alone.text}


async def test_a_client_that_hangs_up_frees_its_blocks_at_once(cluster: Cluster) -> None:
    before = [worker.load.num_running for worker in await cluster.statuses("decode")]
    await hang_up(cluster, [5, 6, 7])
    async with asyncio.timeout(5):
        while [w.load.num_running for w in await cluster.statuses("decode")] != before:
            await asyncio.sleep(0.02)


async def test_no_process_listens_beyond_this_machine(cluster: Cluster) -> None:
    for child in (*cluster.children.values(), cluster.nats.child):
        sockets = psutil.Process(child.pid).net_connections(kind="tcp")
        listening = {socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}
        assert listening == {"127.0.0.1"}, child.log_path


async def test_every_process_ends_when_it_is_told_to(cluster: Cluster) -> None:
    children = dict(cluster.children)
    for name in list(children):
        await cluster.end(name)
        assert children[name].exit_code == 0, children[name].log_tail()
    assert await cluster.instances() == []
    with pytest.raises(aiohttp.ClientError):
        await cluster.get("/live")
