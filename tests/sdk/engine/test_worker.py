"""The worker around an engine: requests, cancellation, and the order of its end."""

import asyncio
from typing import Any

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import (
    ConfigError,
    IncompleteError,
    InternalError,
    InvalidRequestError,
    TandemError,
)
from tandem.sdk import Context, EngineConfig, EngineWorker, GenerateRequest
from tandem.sdk.exceptions import EngineShutdown
from tandem.sdk.sample_engine import SampleEngine, SampleOptions, expected_tokens
from tests.sdk.engine.engine_stack import (
    PATIENCE_S,
    Chunks,
    ToyEngine,
    answer_of,
    begun,
    client_of,
    config_of,
    serving,
)
from tests.services import eventually

REQUEST = {"token_ids": [7, 8, 9]}


async def test_eight_requests_at_once_each_get_their_own_answer(quick: RuntimeConfig) -> None:
    engine = SampleEngine(SampleOptions(token_interval_s=0.001))
    async with serving(engine, config_of(), quick) as worker, client_of(worker) as client:
        prompts = [[100 * i, 100 * i + 1] for i in range(1, 9)]
        answers = await asyncio.gather(
            *(answer_of(client, {"token_ids": prompt}) for prompt in prompts)
        )
        for prompt, chunks in zip(prompts, answers, strict=True):
            generated = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
            assert generated == expected_tokens(prompt, 16)
            assert [chunk.get("finish_reason") for chunk in chunks] == [None] * 15 + ["length"]
            assert chunks[-1]["completion_usage"]["total_tokens"] == 18


async def test_a_caller_that_stops_gets_the_end_and_the_engine_one_abort(
    quick: RuntimeConfig,
) -> None:
    engine = ToyEngine()
    engine.may_go_on.clear()
    async with serving(engine, config_of(), quick) as worker, client_of(worker) as client:
        context = Context("request-1")
        asking = asyncio.create_task(answer_of(client, REQUEST, context))
        await asyncio.wait_for(engine.is_waiting.wait(), PATIENCE_S)
        context.stop_generating()
        chunks = await asyncio.wait_for(asking, PATIENCE_S)
        assert chunks[-1]["finish_reason"] == "cancelled"
        assert engine.aborted == ["request-1"]


async def test_a_caller_that_goes_away_is_an_abort_and_ends_the_generator(
    quick: RuntimeConfig,
) -> None:
    engine = ToyEngine()
    engine.may_go_on.clear()
    async with serving(engine, config_of(), quick) as worker, client_of(worker) as client:
        async with await client.generate(REQUEST, context=Context("request-2")) as answer:
            assert (await anext(answer)).data()["token_ids"] == [1]
        await eventually(lambda: engine.aborted == ["request-2"])
        await eventually(lambda: "generate over" in engine.calls)


async def test_an_answer_that_ends_by_itself_is_never_aborted(quick: RuntimeConfig) -> None:
    engine = ToyEngine()
    async with serving(engine, config_of(), quick) as worker, client_of(worker) as client:
        assert len(await answer_of(client, REQUEST)) == 2
    assert engine.aborted == []


class Faulty(ToyEngine):
    """Ends its answers as `request["model"]` says."""

    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        yield {"token_ids": [1], "index": 0}
        if request["model"] == "gives up":
            raise GeneratorExit
        if request["model"] == "breaks":
            raise RuntimeError("a secret of the engine's")


@pytest.mark.parametrize(
    ("request_fields", "error", "words"),
    [
        ({"model": "ends early"}, InternalError, "finish_reason"),
        ({"model": "breaks"}, InternalError, "internal error"),
        ({"model": "gives up"}, IncompleteError, "gave up the stream"),
        ({"token_ids": "text"}, InvalidRequestError, "token_ids"),
    ],
)
async def test_what_goes_wrong_in_an_answer_reaches_the_caller_as_its_kind(
    quick: RuntimeConfig, request_fields: dict[str, object], error: type[TandemError], words: str
) -> None:
    async with serving(Faulty(), config_of(), quick) as worker, client_of(worker) as client:
        with pytest.raises(error, match=words):
            await answer_of(client, REQUEST | request_fields)


async def test_running_answers_end_before_the_engine_drains_and_is_cleaned_up(
    runtime_config: RuntimeConfig,
) -> None:
    engine = ToyEngine()
    engine.may_go_on.clear()
    async with serving(engine, config_of(), runtime_config) as worker, client_of(worker) as client:
        asking = await begun(engine, client, REQUEST)
        worker.shutdown()
        await eventually(lambda: not client.instance_ids())
        engine.may_go_on.set()
        chunks = await asyncio.wait_for(asking, PATIENCE_S)
        assert chunks[-1]["finish_reason"] == "stop"
    assert engine.calls == ["start", "generate over", "drain", "cleanup"]


async def test_what_does_not_end_in_time_is_left_to_others_as_incomplete(
    quick: RuntimeConfig,
) -> None:
    engine = ToyEngine()
    engine.may_go_on.clear()
    async with serving(engine, config_of(), quick) as worker, client_of(worker) as client:
        asking = await begun(engine, client, REQUEST)
        worker.shutdown()
        with pytest.raises(IncompleteError):
            await asyncio.wait_for(asking, PATIENCE_S)
    assert len(engine.aborted) == 1
    assert engine.calls == ["start", "generate over", "drain", "cleanup"]


class Unkind(ToyEngine):
    """Neither drains nor cleans up in time."""

    async def drain(self) -> None:
        await asyncio.sleep(PATIENCE_S)

    async def cleanup(self) -> None:
        self.calls.append("cleanup")
        await asyncio.sleep(PATIENCE_S)


async def test_an_engine_that_does_not_end_has_one_deadline_for_all_of_it(
    quick: RuntimeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Unkind()
    loop = asyncio.get_running_loop()
    async with serving(engine, config_of(), quick) as worker:
        worker.shutdown()
        started_at = loop.time()
    assert engine.calls == ["start", "cleanup"]
    assert loop.time() - started_at < PATIENCE_S
    # On a busy machine the deadline comes before the engine is asked to drain.
    assert "drain took longer" in caplog.text or "work remained after 0.8 s" in caplog.text
    assert "cleanup took longer" in caplog.text


class Broken(ToyEngine):
    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        raise MemoryError("no room for the weights")


async def test_an_engine_that_does_not_start_is_cleaned_up_and_never_registered(
    quick: RuntimeConfig,
) -> None:
    engine = Broken()
    worker = EngineWorker(engine, config_of(), quick)
    with pytest.raises(EngineShutdown, match="no room for the weights"):
        await worker.run()
    assert engine.calls == ["start", "cleanup"]
    async with client_of(worker) as client:
        assert client.instance_ids() == []


async def test_an_unsupported_field_is_refused_before_anything_is_connected(
    quick: RuntimeConfig,
) -> None:
    with pytest.raises(ConfigError, match=r"WorkerConfig\.endpoint_types"):
        EngineWorker(ToyEngine(), config_of(endpoint_types="chat,images"), quick)


async def test_a_signal_between_registration_and_the_end_of_startup_ends_in_the_same_order(
    quick: RuntimeConfig,
) -> None:
    class Early(ToyEngine):
        async def health_check_payload(self) -> dict[str, Any] | None:
            worker.shutdown()
            await asyncio.sleep(PATIENCE_S)
            return None

    engine = Early()
    worker = EngineWorker(engine, config_of(), quick)
    await asyncio.wait_for(worker.run(), PATIENCE_S)
    assert engine.calls == ["start", "drain", "cleanup"]
