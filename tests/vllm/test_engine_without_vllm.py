"""The engine over a fake AsyncLLM: it runs where vLLM is not installed."""

import asyncio
import importlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError, InternalError, InvalidRequestError, TandemError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import RequestServer
from tandem.runtime.process import logs
from tandem.runtime.wire.messages import PrefillReport, encode, pack_tokens
from tandem.sdk.conformance.kit import examine
from tandem.sdk.conformance.streams import ConformanceSettings
from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.exceptions import (
    EngineShutdown,
    InvalidArgument,
    RouterQueueLimitExceeded,
    StreamIncomplete,
    WorkerUnavailable,
)
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.context import Context
from tandem.vllm import versions
from tandem.vllm.step_messages import COMPUTE, ComputePrompt
from tests.services import eventually
from tests.vllm import fake_vllm
from tests.vllm.fake_vllm import AsyncLLM

OTHER = '{"kv_connector": "Other", "kv_connector_module_path": "", "kv_role": "kv_both"}'
SETTINGS = ConformanceSettings(max_tokens=8, num_abandoned=20)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, fake_vllm.installed():
        patch.setattr(versions, "version", lambda name: "0.32.0")
        yield importlib.import_module("tandem.vllm.engine")


@pytest.fixture
def engine_class(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(AsyncLLM, "made", [])
    monkeypatch.setenv("NATS_SERVER", "nats://here:1")  # not the cluster that may run here
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://here:2")
    return loaded.VllmEngine


@pytest.fixture
async def engine(engine_class: Any) -> AsyncIterator[Any]:
    engine, _ = await engine_class.from_args(["some-model"])
    await engine.start(1)
    yield engine
    await engine.cleanup()


def request_for(
    *token_ids: int, max_tokens: int = 4, sampling: dict[str, Any] | None = None, **stop: Any
) -> GenerateRequest:
    return {
        "token_ids": list(token_ids),
        "sampling_options": sampling or {},
        "stop_conditions": {"max_tokens": max_tokens, **stop},
    }


async def chunks_of(engine: Any, request: GenerateRequest, context: Any = None) -> list[Any]:
    return [chunk async for chunk in engine.generate(request, context or Context())]


async def test_the_engine_passes_the_conformance_kit(engine_class: Any) -> None:
    report = await examine(engine_class, ["some-model"], SETTINGS)
    assert not report.failures, report.text()
    assert report.num_passed >= 10, report.text()
    assert not any(llm.running for llm in AsyncLLM.made)
    assert all(llm.has_ended for llm in AsyncLLM.made)


async def test_vllm_gets_the_prompt_the_salt_the_seed_and_the_grammar(engine: Any) -> None:
    grammar = {"kind": "json_schema", "source": "{}"}
    words = [[8, 9], [3]]
    request = request_for(7, sampling={"seed": 5, "grammar": grammar, "bad_words": words})
    request["extra_args"] = {"cache_salt": "tenant"}
    chunks = await chunks_of(engine, request)
    assert [chunk["token_ids"] for chunk in chunks] == [[8], [9], [10], [11]]
    (llm,) = AsyncLLM.made
    assert llm.prompts == [{"prompt_token_ids": [7], "cache_salt": "tenant"}]
    assert llm.params[0].seed == 5 and llm.params[0].output_kind == "delta"
    assert llm.params[0]._bad_words_token_ids == words
    assert llm.params[0].structured_outputs == fake_vllm.StructuredOutputsParams(json="{}")
    # the frontend writes the grammars of tool calls for this backend
    assert llm.arguments.structured_outputs_config.backend == "guidance"


async def test_a_pooling_model_embeds_and_is_said_to(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncLLM, "tasks", ("embed", "token_embed"))
    engine, _ = await engine_class.from_args(["some-model"])
    assert (await engine.start(1)).endpoint_types == "embeddings"
    request = {"token_ids": [[1, 2], [3]], "kind": "embeddings", "dimensions": 2}
    context = Context()
    assert await engine.embed(request, context) == [[1.0, 1.0]] * 2
    (llm,) = AsyncLLM.made
    params = fake_vllm.PoolingParams("embed", dimensions=2)
    assert llm.pooled == [
        ([1, 2], params, f"{context.id()}-0"), ([3], params, f"{context.id()}-1"),
    ]  # fmt: skip
    llm.failure = ValueError("no matryoshka")
    with pytest.raises(InvalidArgument, match="no matryoshka"):
        await engine.embed(request, Context())
    probe = await engine.health_check_payload()
    assert probe["kind"] == "embeddings" and probe["token_ids"] == [[0]]
    await engine.cleanup()


@pytest.mark.parametrize(("num_types", "extra"), [(2, [1, 2]), (1, [None, None])])
async def test_a_cross_encoder_scores_pairs_with_their_types(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch, num_types: int, extra: list[Any]
) -> None:
    monkeypatch.setattr(AsyncLLM, "tasks", ("classify",))
    config = SimpleNamespace(num_labels=1, type_vocab_size=num_types)
    monkeypatch.setattr(AsyncLLM, "hf_config", config)
    engine, _ = await engine_class.from_args(["some-model"])
    assert (await engine.start(1)).endpoint_types == "rerank"
    request = {"token_ids": [[1, 2], [3, 4, 5]], "kind": "rerank", "second_starts": [1, 2]}
    assert await engine.score(request, Context()) == [0.5, 0.5]
    given = [params.extra_kwargs for _, params, _ in AsyncLLM.made[0].pooled]
    assert [each and each["compressed_token_type_ids"] for each in given] == extra
    await engine.cleanup()


async def test_a_model_that_sees_gets_images_beside_its_tokens(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limits, sees in ((None, False), ({"audio": 1}, False), ({"image": 0}, False)):
        monkeypatch.setattr(AsyncLLM, "mm_limits", limits)
        engine, _ = await engine_class.from_args(["some-model"])
        assert (await engine.start(1)).supports_images is sees
        await engine.cleanup()
    monkeypatch.setattr(AsyncLLM, "mm_limits", {"image": 4})
    engine, _ = await engine_class.from_args(["some-model"])
    assert (await engine.start(1)).supports_images
    first, *rest = await chunks_of(engine, request_for(7) | {"images": [b"PNG red", b"PNG blue"]})
    assert first["num_prompt_tokens"] == 1 + 2 * 9
    assert not any("num_prompt_tokens" in chunk for chunk in rest)
    assert AsyncLLM.made[-1].prompts == [
        {"prompt_token_ids": [7], "multi_modal_data": {"image": ["red", "blue"]}}
    ]
    with pytest.raises(InvalidArgument, match="Failed to load") as refused:
        await chunks_of(engine, request_for(7) | {"images": [b"PNG red", b"PNX"]})
    assert refused.value.param == "images[1]"
    error = fake_vllm.EngineGenerateError()
    error.__cause__ = AssertionError("no place for images[1]")
    AsyncLLM.made[-1].failure = error
    with pytest.raises(InvalidArgument, match="no place for"):  # the caller's, not the worker's
        await chunks_of(engine, request_for(7) | {"images": [b"PNG red"]})
    await engine.cleanup()


async def test_a_model_that_generates_is_for_chats(engine: Any) -> None:
    assert engine._types == ["chat", "completions"]


async def test_an_answer_ends_before_the_token_that_stops_it(engine: Any) -> None:
    chunks = await chunks_of(engine, request_for(7, stop_token_ids=[10]))
    assert [chunk["token_ids"] for chunk in chunks] == [[8], [9], []]
    assert chunks[-1]["finish_reason"] == "stop" and chunks[-1]["stop_reason"] == 10
    assert chunks[-1]["completion_usage"]["completion_tokens"] == 2


async def test_an_abort_ends_vllms_request(engine: Any) -> None:
    context = Context()
    reading = asyncio.create_task(chunks_of(engine, request_for(1, max_tokens=10_000), context))
    (llm,) = AsyncLLM.made
    while not llm.running:
        await asyncio.sleep(0.001)
    context.stop_generating()
    await engine.abort(context)
    chunks = await reading
    assert chunks[-1]["finish_reason"] == "cancelled" and not llm.running


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_vllm_gives_up_is_resumed_by_another_worker(
    engine: Any, reason: str
) -> None:
    AsyncLLM.made[0].failure = reason
    with pytest.raises(StreamIncomplete, match="given up"):
        await chunks_of(engine, request_for(1))


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (fake_vllm.GracefulHTTPError("full"), RouterQueueLimitExceeded),
        (fake_vllm.EngineGenerateError(), WorkerUnavailable),
        (fake_vllm.EngineDeadError(), StreamIncomplete),
    ],
)
async def test_an_error_of_vllm_is_one_of_the_kit(
    engine: Any, failure: Exception, expected: type[TandemError]
) -> None:
    AsyncLLM.made[0].failure = failure
    with pytest.raises(expected):
        await chunks_of(engine, request_for(1))


async def test_a_dead_vllm_takes_no_request(engine: Any) -> None:
    AsyncLLM.made[0].failure = fake_vllm.EngineDeadError()
    with pytest.raises(StreamIncomplete):
        await chunks_of(engine, request_for(1))
    with pytest.raises(EngineShutdown):
        await chunks_of(engine, request_for(1))


async def test_a_refusal_names_the_parameter(engine: Any) -> None:
    llm, error = AsyncLLM.made[0], fake_vllm.VLLMClientError("too large")
    error.parameter, llm.failure = "top_k", error
    with pytest.raises(InvalidArgument, match="too large") as named:
        await chunks_of(engine, request_for(1))
    assert named.value.param == "top_k"
    llm.failure = fake_vllm.VLLMClientError("no such rule")
    grammar = {"kind": "lark", "source": "start: nothing"}
    with pytest.raises(InvalidArgument) as unnamed:
        await chunks_of(engine, request_for(1, sampling={"grammar": grammar}))
    assert unnamed.value.param == "grammar"
    with pytest.raises(InvalidArgument, match="temperature"):
        await chunks_of(engine, request_for(1, sampling={"temperature": -1.0}))


async def test_the_steps_of_vllm_are_the_workers_load(engine: Any) -> None:
    published: list[Any] = []
    engine.attach_snapshot_publisher(
        SimpleNamespace(publish=lambda rank, snapshot: published.append((rank, snapshot)))
    )
    (logger,) = AsyncLLM.made[0].loggers
    prefixes = SimpleNamespace(queries=100, hits=25)
    stats = SimpleNamespace(
        prefix_cache_stats=prefixes, kv_cache_usage=0.5, kv_connector_stats=None
    )
    logger.record(stats, None)
    logger.record(None, None)  # a step without statistics of the scheduler
    (_, empty), (rank, snapshot) = published
    assert empty.kv_used_blocks == 0 and empty.kv_cache_hit_rate is None
    assert rank == 0 and snapshot.kv_used_blocks == 32 and snapshot.kv_total_blocks == 64
    assert snapshot.gpu_cache_usage == 0.5 and snapshot.kv_cache_hit_rate == 0.25


async def test_kv_events_come_from_the_socket_that_vllm_is_given(engine: Any) -> None:
    events = AsyncLLM.made[0].arguments.kv_events_config
    assert events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
    (source,) = await engine.kv_event_sources()
    assert source.endpoint == events.endpoint
    AsyncLLM.made[0].vllm_config.cache_config.enable_prefix_caching = False
    assert await engine.kv_event_sources() == []


async def test_the_started_engine_describes_its_model(engine_class: Any) -> None:
    words = ["some-model", "--namespace", "here", "--served-model-name", "a", "b"]
    engine, config = await engine_class.from_args(words)
    started = await engine.start(1)
    await engine.cleanup()
    assert config.namespace == "here" and config.served_model_name == "a"
    assert started.served_model_name == "a" and started.model_aliases == ["b"]
    assert started.context_length == fake_vllm.MAX_MODEL_LEN and started.supports_grammar
    assert started.supports_token_rules
    assert started.kv_cache_block_size == 128 and started.total_kv_blocks == 64


async def test_an_adapter_is_a_model_of_its_own_name(engine_class: Any) -> None:
    words = ["some-model", "--lora-modules", "terse=/adapters/1", "kind=/adapters/2"]
    engine, _ = await engine_class.from_args(words)
    started = await engine.start(1)
    assert started.model_aliases == ["terse", "kind"]
    for name in ("kind", "some-model", "terse"):
        await chunks_of(engine, request_for(1) | {"model": name})
    (llm,) = AsyncLLM.made
    assert llm.arguments.enable_lora
    assert llm.adapters == [("kind", 2, "/adapters/2"), None, ("terse", 1, "/adapters/1")]
    with pytest.raises(InvalidArgument, match="no adapter 'rude'"):
        await chunks_of(engine, request_for(1) | {"model": "rude"})
    await engine.cleanup()
    with pytest.raises(SystemExit):
        await engine_class.from_args(["some-model", "--lora-modules", "no-path"])


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ([], "MODEL"),
        (["--namespace", "here"], "MODEL"),
        (["some-model", "--data-parallel-size", "2"], "data_parallel_size"),
        (
            ["some-model", "--disaggregation-mode", "decode", "--kv-transfer-config", OTHER],
            "kv_transfer_config",
        ),
    ],
)
async def test_arguments_that_cannot_be_served_are_refused_by_name(
    engine_class: Any, words: list[str], param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await engine_class.from_args(words)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("mode", "role", "served"),
    [("decode", "kv_consumer", "backend"), ("prefill", "kv_producer", "prefill")],
)
async def test_a_mode_of_disaggregation_is_a_connector(
    engine_class: Any, mode: str, role: str, served: str
) -> None:
    engine, config = await engine_class.from_args(["m", "--disaggregation-mode", mode])
    assert config.served_component == served
    await engine.start(1)
    (llm,) = AsyncLLM.made
    transfer = llm.arguments.kv_transfer_config
    assert transfer.kv_role == role and transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_module_path == "tandem.vllm.connector"
    assert ("prompts" in transfer.kv_connector_extra_config) is (mode == "prefill")
    await engine.cleanup()


class Rank:
    """A connector's rank, which has prompts computed."""

    def __init__(self, engine: Any) -> None:
        transfer = engine._arguments.kv_transfer_config
        self._engine = transfer.kv_connector_extra_config["prompts"]
        self.client = RequestClient(find_cluster(), "rank")

    async def compute(self, key: str, token_ids: list[int], cache_salt: str = "") -> bytes:
        prompt = ComputePrompt(key, pack_tokens(token_ids), cache_salt)
        async with RequestContext() as context:
            return await self.client.call(self._engine, COMPUTE, encode(prompt), context)


async def test_a_prefill_engine_computes_the_prompts_that_its_connector_sends(
    engine_class: Any,
) -> None:
    engine, _ = await engine_class.from_args(["m", "--disaggregation-mode", "prefill"])
    await engine.start(1)
    rank, (llm,) = Rank(engine), AsyncLLM.made
    await rank.compute("a-ticket", [1, 2, 3], "salt")
    with pytest.raises(InternalError, match="the prompt is empty"):
        await rank.compute("an-empty-one", [])
    assert llm.prompts == [{"prompt_token_ids": [1, 2, 3], "cache_salt": "salt"}]
    (params,) = llm.params
    assert params.max_tokens == 1
    assert params.extra_args == {"kv_transfer_params": {"tandem_ticket": "a-ticket"}}
    await rank.client.close()
    await engine.cleanup()


async def test_a_ticket_that_comes_before_the_end_of_the_start_waits_for_it(
    engine_class: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    server = RequestServer(find_cluster(), "engine")

    def hold() -> None:
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(AsyncLLM, "hold_start", hold)
    monkeypatch.setattr(loaded, "RequestServer", lambda config, instance_id: server)
    engine, _ = await engine_class.from_args(["m", "--disaggregation-mode", "prefill"])
    starting = asyncio.create_task(engine.start(1))
    assert await asyncio.to_thread(begun.wait, 20)
    rank = Rank(engine)
    computing = asyncio.create_task(rank.compute("a-ticket", [1, 2, 3]))
    left = asyncio.create_task(rank.compute("one that its rank has left", [4]))
    await eventually(lambda: len(server.running) == 2)
    left.cancel()
    await eventually(lambda: len(server.running) == 1)
    assert not computing.done()
    goes_on.set()
    await starting
    await computing
    assert AsyncLLM.made[0].prompts == [{"prompt_token_ids": [1, 2, 3]}]
    await rank.client.close()
    await engine.cleanup()


async def test_the_callers_place_reaches_the_connector_and_its_report_the_caller(
    engine_class: Any,
) -> None:
    engine, _ = await engine_class.from_args(["m", "--disaggregation-mode", "decode"])
    await engine.start(1)
    request = request_for(1, max_tokens=2)
    request["extra_args"] = {"prefill_place": "remote"}
    context = Context()
    first, second = await chunks_of(engine, request, context)
    assert first["prefill"] == PrefillReport("remote", "asked", cause="asked")
    assert "prefill" not in second
    params = AsyncLLM.made[0].params[-1].extra_args["kv_transfer_params"]
    assert params == {"tandem_prefill": "remote", "tandem_report": context.id()}
    assert not engine._load.reports, "reports are kept for open requests alone"
    await engine.cleanup()


async def test_without_the_connector_nothing_is_asked_of_it(engine: Any) -> None:
    request = request_for(1, max_tokens=1)
    request["extra_args"] = {"prefill_place": "remote"}
    (chunk,) = await chunks_of(engine, request)
    assert "prefill" not in chunk and AsyncLLM.made[0].params[-1].extra_args is None


class Registration:
    """An endpoint whose instance is in discovery or not."""

    is_registered = True

    async def withdraw(self) -> None:
        self.is_registered = False

    async def register(self) -> None:
        self.is_registered = True


async def test_an_engine_that_sleeps_gives_its_requests_to_others_until_it_wakes_up(
    engine: Any,
) -> None:
    (llm,), endpoint = AsyncLLM.made, Registration()
    await engine.on_endpoint_ready(endpoint)
    answering = asyncio.create_task(chunks_of(engine, request_for(1, max_tokens=10_000)))
    await eventually(lambda: bool(llm.running))
    asleep = await engine.engine_control("sleep", {"level": 0})
    with pytest.raises(StreamIncomplete, match="given up"):
        await answering
    assert asleep == {"status": "ok", "is_sleeping": True} and not endpoint.is_registered
    assert asleep == await engine.engine_control("is_sleeping", {})
    with pytest.raises(WorkerUnavailable, match="sleeps"):
        await chunks_of(engine, request_for(1))
    assert (await engine.engine_control("wake_up", {"tags": ["weights"]}))["is_sleeping"]
    assert not endpoint.is_registered, "its KV cache sleeps still"
    assert not (await engine.engine_control("wake_up", {}))["is_sleeping"]
    assert endpoint.is_registered and len(await chunks_of(engine, request_for(1))) == 4
    commands = [("sleep", 0, "abort"), ("wake_up", ["weights"]), ("wake_up", None)]
    assert llm.commands == commands


async def test_a_sleep_can_wait_for_the_answers_that_run(engine: Any) -> None:
    (llm,) = AsyncLLM.made
    answering = asyncio.create_task(chunks_of(engine, request_for(1, max_tokens=50)))
    await eventually(lambda: bool(llm.running))
    await engine.engine_control("sleep", {"level": 0, "mode": "wait"})
    assert len(await answering) == 50


@pytest.mark.parametrize(
    ("control", "body", "words"),
    [
        ("sleep", {}, "needs --enable-sleep-mode"),
        ("sleep", {"level": 2}, "<= 1"),
        ("sleep", {"mode": "keep"}, "keep"),
        ("sleep", {"levl": 0}, "unknown field `levl`"),
        ("wake_up", {"tags": ["scheduling"]}, "scheduling"),
        ("is_sleeping", {"level": 1}, "level"),
    ],
)
async def test_a_command_that_cannot_be_followed_is_refused_and_changes_nothing(
    engine: Any, control: str, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        await engine.engine_control(control, body)
    assert AsyncLLM.made[0].commands == [] and len(await chunks_of(engine, request_for(1))) == 4


async def test_a_worker_with_a_connector_never_sleeps_and_forgets_its_prefixes_on_command(
    engine_class: Any,
) -> None:
    engine, _ = await engine_class.from_args(["m", "--disaggregation-mode", "decode"])
    await engine.start(1)
    with pytest.raises(InvalidRequestError, match="another worker may write"):
        await engine.engine_control("sleep", {"level": 0})
    assert not (await engine.engine_control("reset_prefix_cache", {}))["is_sleeping"]
    assert AsyncLLM.made[0].commands == [("reset_prefix_cache",)]
    await engine.cleanup()


async def test_cleanup_ends_the_processes_of_a_start_that_was_cancelled(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    begun = threading.Event()

    def start_process() -> None:
        process.start()
        begun.set()
        process.join()
        raise RuntimeError("the engine's process has ended")

    monkeypatch.setattr(AsyncLLM, "hold_start", start_process)
    engine, _ = await engine_class.from_args(["some-model"])
    starting = asyncio.create_task(engine.start(1))
    assert await asyncio.to_thread(begun.wait, 20)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.cleanup()
    assert not process.is_alive() and not AsyncLLM.made


async def test_the_lines_of_vllms_log_can_have_their_process(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logs._Record)  # as `setup_logging` sets it
    engine, _ = await engine_class.from_args(["some-model"])
    await engine.start(1)
    await engine.cleanup()
    record = logging.makeLogRecord({"msg": "started"})
    assert logging.Formatter("%(process)d %(message)s").format(record) == f"{os.getpid()} started"
