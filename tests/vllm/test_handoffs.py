"""Two vLLMs with Tandem's connector: one computes prompts for the other, and dies at the end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.services import EtcdServer, NatsServer
from tests.vllm.vllm_cluster import NEEDS_VLLM, VllmCluster, random_prompt, with_plugin

pytestmark = NEEDS_VLLM
DEATH = "DIE_NEXT"  # names a file: while it exists, a rank dies before it writes blocks
# Neither missed heartbeats nor the deadline can end a handoff: a lost process must be seen
LONG = {"TANDEM_RUNTIME__HEARTBEAT_MISSES": "10000", "TANDEM_DISAGG__HANDOFF_TIMEOUT_MS": "1800000"}


def die_in_mid_prompt() -> None:
    """In vLLM's processes: kill a rank that has computed blocks of a prompt, when that is due."""
    from tandem.transfer.handoff.writer import BlockWriter

    due, write_ready = Path(os.environ[DEATH]), BlockWriter.write_ready

    def dying(self: BlockWriter, computed: Any) -> None:
        if due.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        write_ready(self, computed)

    BlockWriter.write_ready = dying  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def death(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugin") / "death"


@pytest.fixture(scope="module")
def cluster(
    nats: NatsServer,
    etcd: EtcdServer,
    model: Path,
    death: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmCluster]:
    cluster = VllmCluster(nats, etcd, model, tmp_path_factory.mktemp("logs"))
    plugin = with_plugin(death.parent, "tests.vllm.test_handoffs:die_in_mid_prompt")
    cluster.environment |= LONG | {DEATH: str(death), "PYTHONPATH": plugin}
    cluster.start_frontend()
    cluster.start_pair()
    yield cluster
    cluster.end()


@pytest.fixture
async def ready(cluster: VllmCluster, http: aiohttp.ClientSession) -> AsyncIterator[VllmCluster]:
    await cluster.ready(http)
    await cluster.prefill_ready()
    yield cluster


async def test_answers_are_those_of_an_unsplit_vllm(
    ready: VllmCluster, http: aiohttp.ClientSession
) -> None:
    lengths = [64, 127, 128, 129, 130, 257, 500, 1000, 1900]
    before = await ready.num_ended("admitted")
    for num_tokens in lengths:
        prompt = random_prompt(num_tokens)
        for sampling in ({}, {"temperature": 1.0, "seed": num_tokens}):
            remote, headers = await ready.ask(http, prompt, "remote", **sampling)
            assert headers["x-tandem-prefill"] == "remote"
            local, headers = await ready.ask(http, prompt, "local", **sampling)
            assert remote == local and headers["x-tandem-prefill"] == "local"
            assert headers["x-tandem-prefill-reason"] == "asked for by the request"
    assert await ready.num_ended("admitted") == before + 2 * len(lengths)


async def test_a_cached_prefix_is_not_sent_again(
    ready: VllmCluster, http: aiohttp.ClientSession
) -> None:
    prompt, salt = random_prompt(700), "shared"
    first = await ready.complete(http, prompt[:400], "local", cache_salt=salt)
    assert first
    remote = await ready.complete(http, prompt, "remote", cache_salt=salt)
    assert remote == await ready.complete(http, prompt, "local")


@pytest.mark.parametrize("part", ["rank", "scheduler", "engine"])
async def test_a_stopped_prefill_worker_is_given_up_at_once(
    ready: VllmCluster, http: aiohttp.ClientSession, part: str
) -> None:
    process = ready.prefill_processes[part]
    process.send_signal(signal.SIGSTOP)
    try:
        prompt = random_prompt(1900)
        expected = await ready.complete(http, prompt, "local")
        answer, headers = await ready.ask(http, prompt, "remote")
        assert answer == expected and headers["x-tandem-prefill"] == "local"
        assert headers["x-tandem-prefill-reason"].startswith("remote failed: ")
    finally:
        process.send_signal(signal.SIGCONT)
    prompt = random_prompt(300)
    remote = await ready.complete(http, prompt, "remote")
    assert remote == await ready.complete(http, prompt, "local")


async def test_a_killed_prefill_worker_is_given_up_at_once(
    ready: VllmCluster, http: aiohttp.ClientSession, death: Path
) -> None:
    prompt = random_prompt(1900)
    expected = await ready.complete(http, prompt, "local")
    await asyncio.to_thread(death.touch)
    answer, headers = await ready.ask(http, prompt, "remote")
    assert answer == expected and headers["x-tandem-prefill"] == "local"
    assert headers["x-tandem-prefill-reason"].endswith(" was lost")
