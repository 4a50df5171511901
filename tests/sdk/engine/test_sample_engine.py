"""The engine without a model: what it says, how it ends, and the way from HTTP to it and back."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.config import RuntimeConfig
from tandem.sdk import Context, DisaggregationMode, ModelInput
from tandem.sdk.engine.health_check import is_probe
from tandem.sdk.sample_engine import (
    FIRST_TOKEN_ID,
    VOCAB_SIZE,
    SampleEngine,
    SampleOptions,
    expected_tokens,
)
from tests.sdk.engine.engine_stack import PATIENCE_S, ToyEngine, config_of, serving
from tests.sdk.worker.model_stack import ModelStack, with_engine
from tests.services import eventually

AT_ONCE = SampleOptions(token_interval_s=0.0)


async def chunks_of(engine: SampleEngine, request: Any, context: Any = None) -> list[Any]:
    return [chunk async for chunk in engine.generate(request, context or Context())]


def tokens_of(chunks: list[Any]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk["token_ids"]]


async def test_an_answer_resumes_where_another_one_was_cut() -> None:
    engine = SampleEngine(AT_ONCE)
    prompt = [9, VOCAB_SIZE - 4]
    whole = await chunks_of(engine, {"token_ids": prompt, "stop_conditions": {"max_tokens": 9}})
    assert tokens_of(whole) == expected_tokens(prompt, 9)
    assert min(tokens_of(whole)) == FIRST_TOKEN_ID  # it went round, past the special tokens
    for num_generated in range(9):
        generated = tokens_of(whole)[:num_generated]
        stop = {"max_tokens": 9 - num_generated}
        rest = await chunks_of(engine, {"token_ids": prompt + generated, "stop_conditions": stop})
        assert generated + tokens_of(rest) == tokens_of(whole)


async def test_the_last_chunk_alone_has_a_reason_and_the_usage() -> None:
    chunks = await chunks_of(SampleEngine(AT_ONCE), {"token_ids": [5, 6]})
    assert [chunk.get("finish_reason") for chunk in chunks] == [None] * 15 + ["length"]
    assert [chunk.get("completion_usage") for chunk in chunks[:-1]] == [None] * 15
    usage = {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
    assert chunks[-1]["completion_usage"] == usage


async def test_a_stop_token_ends_the_answer_and_is_no_part_of_it() -> None:
    stop = {"max_tokens": 9, "stop_token_ids": [8, 10], "min_tokens": 2}
    chunks = await chunks_of(SampleEngine(AT_ONCE), {"token_ids": [6], "stop_conditions": stop})
    assert tokens_of(chunks) == [7, 8, 9]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", 10)


@pytest.mark.parametrize("num_best", [None, 0, 3])
async def test_logprobs_come_only_when_they_are_asked_for(num_best: int | None) -> None:
    chunks = await chunks_of(
        SampleEngine(AT_ONCE), {"token_ids": [6], "output_options": {"logprobs": num_best}}
    )
    for chunk in chunks:
        assert ("log_probs" in chunk) == (num_best is not None)
        assert ("top_logprobs" in chunk) == bool(num_best)
        if num_best:
            (best,) = chunk["top_logprobs"]
            assert [each["rank"] for each in best] == [1, 2, 3]
            assert (best[0]["token_id"], best[0]["logprob"]) == (
                chunk["token_ids"][0],
                chunk["log_probs"][0],
            )


@pytest.mark.parametrize("options", [AT_ONCE, SampleOptions(ttft_s=PATIENCE_S)])
async def test_it_ends_soon_after_the_caller_stops_it(options: SampleOptions) -> None:
    context = Context()
    asyncio.get_running_loop().call_later(0.02, context.stop_generating)
    request = {"token_ids": [6], "stop_conditions": {"max_tokens": 10**6}}
    if options is AT_ONCE:
        context.stop_generating()
    chunks = await asyncio.wait_for(chunks_of(SampleEngine(options), request, context), 60.0)
    assert chunks[-1]["finish_reason"] == "cancelled"


async def test_flags_set_what_they_name() -> None:
    engine, config = await SampleEngine.from_args(
        [
            "--model-name", "test-model", "--ttft-ms", "5", "--token-interval-ms", "2",
            "--max-tokens", "3", "--namespace", "n", "--component", "c", "--endpoint", "e",
            "--disaggregation-mode", "prefill", "--endpoint-types", "chat",
            "--context-length", "100000",
        ]
    )  # fmt: skip
    assert (engine.options.ttft_s, engine.options.token_interval_s) == (0.005, 0.002)
    assert (config.namespace, config.component, config.endpoint) == ("n", "c", "e")
    assert config.served_model_name == "test-model"
    served = await engine.start(0)
    assert (served.context_length, served.total_kv_blocks) == (100_000, 6250)
    assert config.disaggregation_mode is DisaggregationMode.PREFILL
    (chunk,) = await chunks_of(engine, {"token_ids": [6], "stop_conditions": {"max_tokens": 8}})
    assert chunk["disaggregated_params"] == {"first_token": 7}


async def test_its_blocks_are_counted_while_requests_run_and_given_back() -> None:
    engine = SampleEngine(AT_ONCE)
    seen: list[int] = []
    publisher = SimpleNamespace(publish=lambda rank, snap: seen.append(snap.kv_used_blocks))
    engine.attach_snapshot_publisher(publisher)  # type: ignore[arg-type]
    await chunks_of(engine, {"token_ids": list(range(40))})
    assert seen == [3, 0]
    assert await engine.is_quiescent()
    payload = await engine.health_check_payload()
    assert payload is not None
    assert is_probe(payload)


# ---- with a frontend --------------------------------------------------------------------------


async def test_two_models_are_served_side_by_side_and_leave_with_their_workers(
    quick: RuntimeConfig,
) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    prompt = "The keeper of the lighthouse"
    expected = tokenizer.decode(expected_tokens(tokenizer.encode(prompt).ids, 12))
    counting = SampleEngine(SampleOptions("sample", token_interval_s=0.001))
    text = config_of(namespace="other", served_model_name="talker", model_input=ModelInput.Text)

    async def are_listed(*names: str) -> bool:
        return sorted(await stack.listed()) == list(names)

    async with (
        ModelStack(quick) as stack,
        serving(counting, config_of(served_model_name="sample"), quick),
    ):
        async with serving(Talker(), text, quick):
            await eventually(lambda: are_listed("sample", "talker"))
            answer = await stack.complete("sample", prompt=prompt, max_tokens=12, logprobs=1)
            assert answer["choices"][0]["text"] == expected
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 12
            assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 12

            answer = await stack.chat("talker")
            assert answer["choices"][0]["message"]["content"] == "you said: Hi"
            assert answer["usage"]["total_tokens"] == 3
            assert (await stack.complete("talker"))["choices"][0]["text"] == "you said: Hi"
            messages = [{"role": "user", "content": "Hi"}]
            chat = {"model": "talker", "messages": messages, "stream": True}
            streamed = await stack.http.post("/v1/chat/completions", json=chat)
            assert '"content":"you said: "' in streamed.text.replace('": "', '":"')
        await eventually(lambda: are_listed("sample"))


async def test_a_prompt_that_fills_a_long_context_is_served(quick: RuntimeConfig) -> None:
    context_length = 2**17
    options = SampleOptions("long", token_interval_s=0.0, context_length=context_length)

    config = config_of(served_model_name="long")
    async with with_engine(SampleEngine(options), config, quick) as stack:
        prompt = [FIRST_TOKEN_ID] * (context_length - 2)
        answer = await stack.complete("long", prompt=prompt, max_tokens=2)
        assert answer["usage"]["prompt_tokens"] == context_length - 2
        assert answer["usage"]["completion_tokens"] == 2


class Talker(ToyEngine):
    async def generate(self, request: Any, context: Context) -> Any:
        is_chat = "messages" in request
        yield {"token_ids": [], "index": 0, "text": "you said: "}
        yield {
            "token_ids": [],
            "index": 0,
            "text": request["messages"][0]["content"] if is_chat else request["prompt"],
            "finish_reason": "stop",
            "completion_usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        }
