"""Two vLLMs of two ranks each, with Tandem's connector. The last test kills a prefill rank."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.services import EtcdServer, NatsServer, eventually, free_port
from tests.vllm.vllm_cluster import (
    NEEDS_VLLM,
    VllmCluster,
    kv_in_use,
    parts_of,
    random_prompt,
    with_plugin,
)

pytestmark = NEEDS_VLLM
FLIP = "FLIP_NEXT"  # names a file: while it exists, the next block of rank 1 loses it and a bit
HANDOFF_TIMEOUT_S = 60.0  # the least time after which a handoff is given up in any case
# A busy machine may neither miss a heartbeat nor the deadline; a lost rank is seen before that.
PATIENT = {
    "TANDEM_RUNTIME__HEARTBEAT_MISSES": "12",
    "TANDEM_DISAGG__HANDOFF_TIMEOUT_MS": f"{HANDOFF_TIMEOUT_S * 1e3:.0f}",
}
PORTS = {"decode": free_port(), "prefill": free_port()}


def was_due(flip: Path) -> bool:
    was_there = flip.exists()
    flip.unlink(missing_ok=True)
    return was_there


def flip_in_the_second_rank() -> None:
    """In vLLM's processes: flip a bit in a block that has landed in rank 1, when one is due."""
    from tandem.transfer.handoff.receiver import HandoffReceiver

    due, verify = Path(os.environ[FLIP]), HandoffReceiver._verify

    async def flipped(self: Any, work: Any) -> None:
        if not self._server.has_tickets and was_due(due):
            self._group.pool.tensor[work.blocks[0][1], 3] ^= 64
        await verify(self, work)

    HandoffReceiver._verify = flipped  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def flip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugin") / "flip"


@pytest.fixture(scope="module")
def cluster(
    nats: NatsServer,
    etcd: EtcdServer,
    model: Path,
    flip: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmCluster]:
    cluster = VllmCluster(nats, etcd, model, tmp_path_factory.mktemp("logs"))
    plugin = "tests.vllm.test_ranks:flip_in_the_second_rank"
    cluster.environment |= {FLIP: str(flip), "PYTHONPATH": with_plugin(flip.parent, plugin)}
    cluster.environment |= PATIENT
    cluster.start_frontend()
    for mode, batched in (("decode", "2048"), ("prefill", "256")):
        cluster.start_engine(
            "--tensor-parallel-size", "2", "--max-num-batched-tokens", batched,
            "--disaggregation-mode", mode, metrics_port=PORTS[mode],
        )  # fmt: skip
    yield cluster
    cluster.end()


@pytest.fixture
async def ready(cluster: VllmCluster, http: aiohttp.ClientSession) -> AsyncIterator[VllmCluster]:
    await cluster.ready(http)
    await cluster.prefill_ready(num_ranks=2)
    yield cluster


async def nothing_is_in_use(http: aiohttp.ClientSession, *modes: str) -> None:
    """Wait until no engine of these has a block in use."""

    async def none_is() -> bool:
        return not any([await kv_in_use(http, PORTS[mode]) for mode in modes])

    await eventually(none_is, pause_s=0.1)


async def test_answers_are_those_of_an_unsplit_vllm_of_two_ranks(
    ready: VllmCluster, http: aiohttp.ClientSession
) -> None:
    lengths, answers = [64, 128, 129, 257, 500, 1000, 1900], set()
    before = await ready.num_ended("admitted")
    for num_tokens in lengths:
        prompt = random_prompt(num_tokens)
        for sampling in ({}, {"temperature": 1.0, "seed": num_tokens}):
            remote, headers = await ready.ask(http, prompt, "remote", **sampling)
            assert headers["x-tandem-prefill"] == "remote", headers["x-tandem-prefill-reason"]
            assert remote == await ready.complete(http, prompt, "local", **sampling)
            answers.add(remote)
    assert await ready.num_ended("admitted") == before + 2 * 2 * len(lengths)
    assert len(answers) > len(lengths), "the model ignores its KV: wrong KV would go unseen"
    await nothing_is_in_use(http, "decode", "prefill")


async def test_a_bit_flipped_in_the_second_rank_is_caught(
    ready: VllmCluster, http: aiohttp.ClientSession, flip: Path
) -> None:
    prompt, before = random_prompt(1000), await ready.num_ended("corrupt")
    await asyncio.to_thread(flip.touch)
    answer, headers = await ready.ask(http, prompt, "remote")
    assert not was_due(flip) and headers["x-tandem-prefill"] == "local"
    assert "checksum" in headers["x-tandem-prefill-reason"]
    assert answer == await ready.complete(http, prompt, "local")
    assert await ready.num_ended("corrupt") == before + 1
    await nothing_is_in_use(http, "decode", "prefill")
    assert not any(each.details["num_open_handoffs"] for each in await ready.members())


async def test_callers_that_leave_free_the_blocks_of_both_ranks(
    ready: VllmCluster, http: aiohttp.ClientSession
) -> None:
    prompts = [random_prompt(random.randrange(64, 1500)) for _ in range(12)]
    remote = [asyncio.create_task(ready.complete(http, each, "remote")) for each in prompts]
    await asyncio.sleep(0.3)
    for task in remote[::2]:
        task.cancel()
    for prompt, answer in zip(prompts, await asyncio.gather(*remote, return_exceptions=True),
                              strict=True):  # fmt: skip
        if isinstance(answer, str):
            assert answer == await ready.complete(http, prompt, "local")
        else:
            assert isinstance(answer, asyncio.CancelledError), answer
    await nothing_is_in_use(http, "decode", "prefill")
    assert not any(each.details["num_open_handoffs"] for each in await ready.members())


async def test_a_stopped_rank_of_the_prefill_worker_is_given_up_before_it_claims(
    ready: VllmCluster, http: aiohttp.ClientSession
) -> None:
    prompt, second = random_prompt(1900), parts_of(psutil.Process(ready.engine.pid))["rank 1"]
    expected = await ready.complete(http, prompt, "local")
    second.suspend()
    try:
        began_at = time.perf_counter()
        answer, headers = await ready.ask(http, prompt, "remote")
        assert answer == expected and headers["x-tandem-prefill"] == "local"
        reason = headers["x-tandem-prefill-reason"]
        assert reason.startswith("remote failed: ") and "deadline" not in reason
        assert time.perf_counter() - began_at < HANDOFF_TIMEOUT_S
    finally:
        second.resume()
    await nothing_is_in_use(http, "decode", "prefill")


async def test_a_killed_rank_of_the_prefill_worker_is_given_up(
    ready: VllmCluster, http: aiohttp.ClientSession
) -> None:
    prompt = random_prompt(1900)
    expected = await ready.complete(http, prompt, "local")
    asked = asyncio.create_task(ready.ask(http, prompt, "remote"))
    while sum(int(each.details["num_jobs"]) for each in await ready.members()) < 2:
        assert not asked.done(), "the prompt is too short to be lost"
    parts_of(psutil.Process(ready.engine.pid))["rank 1"].kill()
    answer, headers = await asked
    assert answer == expected and headers["x-tandem-prefill"] == "local"
    assert headers["x-tandem-prefill-reason"].startswith("remote failed: ")
    await nothing_is_in_use(http, "decode")
