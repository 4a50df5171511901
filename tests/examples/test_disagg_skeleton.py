"""examples/disagg_skeleton, run as its docstring says."""

import asyncio
from types import ModuleType
from typing import Any

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.sdk import Client, DistributedRuntime, ServiceConfig, serve_service
from tests.examples.example_cluster import EXAMPLES, ExampleCluster
from tests.programs import imported
from tests.services import eventually

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


async def check(client: Client, words: list[str], place: str) -> None:
    answer = await client.generate({"text": " ".join(words)}, annotated=False)
    assert [item async for item in answer] == [
        {"word": word.upper(), "prefill": place} for word in words
    ]


@pytest.mark.slow
async def test_long_prompts_are_prefilled_by_another_worker_and_read_from_its_kv(
    examples: ExampleCluster,
) -> None:
    command = ["-m", "tandem.launch", "run", "disagg_skeleton:DecodeWorker"]
    patience = "--DecodeWorker.prefill_timeout_s=60"
    running = examples.start("disagg_skeleton", *command, patience)
    config = RuntimeConfig(
        namespace=examples.namespace, nats_url=examples.nats.url, etcd_endpoints=examples.etcd.url
    )
    async with DistributedRuntime(config) as runtime:
        client = await runtime.endpoint("disagg-skeleton.DecodeWorker.generate").client()
        await client.wait_for_instances(timeout_s=60)
        for words, place in ((WORDS[:3], "local"), (WORDS[:4], "remote"), (WORDS, "remote")):
            await check(client, words, place)
        await client.close()
    example_client = examples.start("disagg_skeleton", "client.py", "jackdaws", "love")
    assert example_client.process.wait(60) == 0
    assert example_client.output == "JACKDAWS (local)\nLOVE (local)\n"
    assert running.end() == 0


@pytest.fixture
def skeleton() -> ModuleType:
    return imported(EXAMPLES / "disagg_skeleton" / "disagg_skeleton.py")


async def test_a_prefill_that_is_late_is_done_locally_and_its_blocks_are_free_when_it_has_come(
    skeleton: ModuleType, runtime_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[Any] = []

    class KvCache(skeleton.KvCache):  # type: ignore[name-defined, misc]
        def __init__(self, engine_id: str) -> None:
            super().__init__(engine_id)
            caches.append(self)

    settings = {"DecodeWorker": {"prefill_timeout_s": 0.1}}
    monkeypatch.setattr(ServiceConfig, "_instance", ServiceConfig(settings))
    monkeypatch.setattr(skeleton, "KvCache", KvCache)
    async with DistributedRuntime(runtime_config) as decode:
        serving = [asyncio.create_task(serve_service(decode, skeleton.DecodeWorker))]
        client = await decode.endpoint("disagg-skeleton.DecodeWorker.generate").client()
        await client.wait_for_instances(timeout_s=60)
        await check(client, WORDS, "local")
        assert len(caches[0].free) == skeleton.NUM_BLOCKS - len(WORDS)
        async with DistributedRuntime(runtime_config) as prefill:
            serving.append(asyncio.create_task(serve_service(prefill, skeleton.PrefillWorker)))
            await eventually(lambda: len(caches[0].free) == skeleton.NUM_BLOCKS, 20)
            prefill.shutdown()
            await serving[1]
        await client.close()
        decode.shutdown()
        await serving[0]
