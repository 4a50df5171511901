"""Embeddings and scores of an engine of the kit, over HTTP and by itself."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.messages import VectorRequest, pack_tokens
from tandem.sdk import Context, ModelInput
from tandem.sdk.engine.types import EngineConfig
from tandem.sdk.engine_worker.handler import EngineHandler
from tandem.sdk.sample_engine import SampleEngine, hashed_vector
from tandem.sdk.wire.vector_requests import VectorCodec
from tests.sdk.engine.engine_stack import PATIENCE_S, ToyEngine, config_of
from tests.sdk.worker.model_stack import with_engine


async def test_the_sample_engine_embeds_and_ranks_over_http(runtime_config: RuntimeConfig) -> None:
    quick = runtime_config.model_copy(update={"drain_timeout_s": 0.3})
    config = config_of(served_model_name="sample", endpoint_types="embeddings, rerank")
    async with with_engine(SampleEngine(), config, quick) as stack:
        texts = ["It is sunny in Paris.", "The cat sleeps."]
        body = {"model": "sample", "input": texts, "dimensions": 32}
        answer = (await stack.http.post("/v1/embeddings", json=body)).json()
        vectors = [each["embedding"] for each in answer["data"]]
        assert [len(each) for each in vectors] == [32, 32]
        assert all(abs(sum(number**2 for number in each) - 1) < 1e-5 for each in vectors)
        query = {"model": "sample", "query": "Where does the cat sleep?", "documents": texts}
        ranked = (await stack.http.post("/v1/rerank", json=query)).json()["results"]
        assert [each["index"] for each in ranked] == [1, 0]
        refused = await stack.http.post("/v1/completions", json={"model": "sample", "prompt": "a"})
        assert refused.status_code == 400


def test_near_texts_have_near_vectors() -> None:
    def nearness(one: list[int], other: list[int]) -> float:
        pairs = zip(hashed_vector(one), hashed_vector(other), strict=True)
        return sum(a * b for a, b in pairs)

    assert nearness([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
    assert nearness([1, 2, 3, 4], [1, 2, 3, 9]) > nearness([1, 2, 3, 4], [5, 6, 7, 8])


def request_of(kind: Any, *inputs: list[int]) -> VectorRequest:
    return VectorRequest("r", "m", kind, [pack_tokens(each) for each in inputs], 1000)


@pytest.mark.parametrize(
    ("kind", "item", "message"),
    [
        ("embeddings", {"scores": [1.0, 2.0]}, "no `embeddings`"),
        ("rerank", {"embeddings": [[1.0], [2.0]]}, "no `scores`"),
        ("embeddings", {"embeddings": [[1.0]]}, "1 entries for 2 inputs"),
        ("embeddings", {"embeddings": [[1.0], ["a"]]}, "something else than numbers"),
        ("embeddings", {"embeddings": [[1.0], []]}, "empty vector"),
        ("rerank", {"scores": [1.0, float("nan")]}, "not finite"),
        ("rerank", [1.0, 2.0], "no `scores`"),
    ],
)
def test_an_answer_of_another_form_names_the_key(kind: Any, item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VectorCodec(request_of(kind, [1], [2])).encode(item)


class Waiting(ToyEngine):
    """Its `embed` waits until it is cancelled."""

    was_cancelled = False

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="tandem-tiny", endpoint_types="embeddings")

    async def embed(self, request: Any, context: Context) -> Sequence[Sequence[float]]:
        self.is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return []


async def test_a_caller_who_leaves_cancels_the_engines_work() -> None:
    engine, context = Waiting(), Context()
    handler = EngineHandler(engine, lambda: None)

    async def answers() -> list[Any]:
        request = {"kind": "embeddings", "token_ids": [[1]]}
        return [item async for item in handler.serve(request, context)]

    asking = asyncio.create_task(answers())
    await asyncio.wait_for(engine.is_waiting.wait(), PATIENCE_S)
    assert handler.num_running == 1
    context.stop_generating()
    assert await asyncio.wait_for(asking, PATIENCE_S) == []
    assert engine.was_cancelled and handler.num_running == 0


async def test_what_the_loaded_model_serves_is_stronger_than_the_config(
    runtime_config: RuntimeConfig,
) -> None:
    async with with_engine(Waiting(), config_of(), runtime_config) as stack:
        [model] = stack.server.catalog.models
        assert model.card.model_types == ["embeddings"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint_types": "chat,images"}, "known are chat, completions, embeddings and rerank"),
        ({"endpoint_types": ""}, "known are"),
        ({"endpoint_types": "rerank", "model_input": ModelInput.Text}, "engines of tokens"),
    ],
)
def test_types_that_cannot_be_served_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**fields).check()
