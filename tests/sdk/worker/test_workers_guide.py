"""The programs in docs/workers.md do what the guide says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.store.discovery import models_prefix
from tandem.sdk import Context
from tests.processes import cluster_variables
from tests.programs import of_guide
from tests.sdk.kit_pair import PATIENCE_S, Pair, data_of


@pytest.fixture(autouse=True)
def cluster(runtime_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> RuntimeConfig:
    for name, text in cluster_variables(runtime_config).items():
        monkeypatch.setenv(name, text)
    return runtime_config


def program(part: str, folder: Path) -> ModuleType:
    return of_guide("workers.md", part, folder)


@asynccontextmanager
async def running(module: ModuleType) -> AsyncIterator[None]:
    task = asyncio.create_task(module.main())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_client_prints_what_the_worker_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(program("# echo_worker.py", tmp_path)):
        await program("# echo_client.py", tmp_path).main()
    assert capsys.readouterr().out.split() == ["hello", "from", "afar"]


async def test_a_pydantic_handler_checks_its_requests(pair: Pair, tmp_path: Path) -> None:
    client = await pair.serve(program("class Question", tmp_path).answer)
    answer = await data_of(await client.generate({"text": "a b c", "limit": 2}))
    assert [item["word"] for item in answer] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="limit"):
        await data_of(await client.generate({"text": "a", "limit": "some"}))
    first_word = program("async def first_word", tmp_path).first_word
    assert await first_word(client) == "one"


async def test_a_relay_passes_items_and_cancellation_on(pair: Pair, tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def count(request: Any, context: Context) -> AsyncIterator[int]:
        while not context.is_stopped():
            yield 1
            await asyncio.sleep(0)
        ended.set()

    client = await pair.serve(count)
    relay = program("async def relay", tmp_path).relay
    context = Context()
    async for item in relay({}, context, client):
        assert item == 1
        context.stop_generating()
    await asyncio.wait_for(ended.wait(), PATIENCE_S)


async def test_the_model_is_registered_counts_and_passes_the_guides_test(
    pair: Pair, cluster: RuntimeConfig, tmp_path: Path
) -> None:
    model = program("# counting_model.py", tmp_path)
    test = program("test_a_stopped_request_ends_soon", tmp_path)
    await test.test_a_stopped_request_ends_soon(model.generate)
    async with running(model):
        client = await pair.caller.endpoint("counting.backend.generate").client()
        await client.wait_for_instances(PATIENCE_S)
        (key,) = await pair.caller.discovery.get_prefix(models_prefix(cluster.namespace))
        assert "counting" in key
        request = {"token_ids": [5], "stop_conditions": {"max_tokens": 2}}
        assert await data_of(await client.generate(request)) == [
            {"token_ids": [6], "finish_reason": None},
            {"token_ids": [7], "finish_reason": "length"},
        ]
