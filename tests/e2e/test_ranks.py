"""Workers of several ranks beside workers of one: the same answers, and what may happen to them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from tandem.worker.worker import EXIT_DEVICE_LOST
from tests.e2e.cluster import Answer, Cluster, write_sensitive_model
from tests.e2e.serving import serving

TOPOLOGY = """
description: a prefill worker of two ranks beside a decode worker of one

roles:
  frontend: {count: 1}
  prefill: {count: 1, gpu: cpu, config: {engine.tp: 2}}
  decode: {count: 1, gpu: cpu}
"""
WIDTHS = (1, 2, 4)
SLOW_MACHINE = ("--engine.threads=1", "--disagg.claim_timeout_ms=20000")


async def test_a_topology_of_two_widths_has_the_answers_of_one(tmp_path: Path) -> None:
    (tmp_path / "widths.yaml").write_text(TOPOLOGY)
    async with (
        serving(str(tmp_path / "widths.yaml"), tmp_path) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
    ):

        async def choice(prompt: str, place: str) -> Any:
            body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
            headers = {"x-tandem-prefill": place}
            where = f"{url}/v1/completions"
            async with http.post(where, json=body | {"logprobs": 3}, headers=headers) as answer:
                assert answer.status == 200 and answer.headers["x-tandem-prefill"] == place
                return (await answer.json())["choices"]

        for name in "AB":  # remote first: a prompt that the worker has cached stays local
            prompt = f"{name} wrote a letter about the sea"
            assert await choice(prompt, "remote") == await choice(prompt, "local")


@pytest.mark.slow
@pytest.mark.timeout(600)  # three decode workers of seven processes, and three prefill workers
async def test_handoffs_between_all_pairs_of_widths_of_a_model_of_two_kv_heads(
    tmp_path: Path,
) -> None:
    """Each prompt is asked for eight times, of whichever decode workers take it."""
    model = write_sensitive_model(tmp_path / "model")
    index = 0
    async with Cluster(tmp_path, model) as cluster:
        await cluster.start("frontend", "frontend")
        for tp in WIDTHS:
            await cluster.start(f"d{tp}", "decode", "--tp", str(tp), *SLOW_MACHINE)
            await cluster.registered(f"d{tp}")
        for tp in WIDTHS:
            await cluster.start("p", "prefill", "--tp", str(tp), *SLOW_MACHINE)
            await cluster.ready(1, len(WIDTHS))
            decodes = {each.details["tp"] for each in await cluster.statuses("decode")}
            assert decodes == set(WIDTHS)
            were_handed_to: set[str] = set()
            async with asyncio.timeout(120):
                while len(were_handed_to) < len(WIDTHS):
                    index += 1
                    answers = await eight_times(cluster, index)
                    were_handed_to |= {
                        answer.headers["x-tandem-decode-instance"]
                        for answer in answers
                        if answer.place == "remote"
                    }
                    assert len({repr(answer.body["choices"]) for answer in answers}) == 1
            await cluster.balanced()
            await cluster.end("p")


async def eight_times(cluster: Cluster, index: int) -> list[Answer]:
    """Return the answers to one prompt, half of them without a prefill worker."""
    asking = [
        cluster.complete(
            prompt(index, 40 + 9 * (index % 12)),
            max_tokens=16,
            temperature=0.8,
            seed=index,
            logprobs=2,
            headers={"x-tandem-prefill": place},
        )
        for place in ("remote", "local") * 4
    ]
    answers = await asyncio.gather(*asking)
    assert {answer.status for answer in answers} == {200}
    return answers


# ---- the death of a rank ------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = write_sensitive_model(folder / "model")
    async with Cluster(folder, model) as cluster:
        await cluster.start("frontend", "frontend")
        for name, role, tp in (("p1", "prefill", 1), ("p2", "prefill", 2)):
            await cluster.start(name, role, "--tp", str(tp), "--engine.threads=1")
        for name, tp in (("d1", 1), ("d2", 2)):
            await cluster.start(name, "decode", "--tp", str(tp), "--engine.threads=1")
        await cluster.ready(2, 2)
        yield cluster


def prompt(index: int, length: int) -> list[int]:
    return [5 + (index * 7 + place * 13) % 290 for place in range(length)]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_when_a_rank_ends_or_stops_its_worker_leaves_and_answers_go_on(
    cluster: Cluster, number: signal.Signals
) -> None:
    options = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    undisturbed = [await cluster.complete(prompt(i, 20), **options) for i in range(6)]
    child = cluster.children["d2"]
    [follower] = psutil.Process(child.pid).children()
    are_asking = asyncio.Event()

    async def ask(index: int) -> None:
        while child.exit_code is None:
            answer = await cluster.complete(prompt(index, 20), **options)
            assert answer.text == undisturbed[index].text
            are_asking.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for index in range(6):
            group.create_task(ask(index))
        await are_asking.wait()
        os.kill(follower.pid, number)
    assert child.exit_code == EXIT_DEVICE_LOST
    assert f"rank 1 of 2 (pid {follower.pid}) was" in child.log_tail()
    psutil.wait_procs([follower], timeout=10)
    assert not follower.is_running()
    await cluster.end("d2")
    await cluster.start("d2", "decode", "--tp", "2", "--engine.threads=1")
    await cluster.ready(2, 2)
    await cluster.balanced()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_no_rank_outlives_its_killed_leader(cluster: Cluster) -> None:
    leader = psutil.Process(cluster.children["p2"].pid)
    [follower] = leader.children()
    leader.kill()
    gone, _ = psutil.wait_procs([follower], timeout=30)
    assert gone == [follower]
    await cluster.end("p2")
