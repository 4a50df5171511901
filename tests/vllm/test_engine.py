"""`tandem engine vllm`, served behind `tandem frontend`, and checked by the conformance kit."""

import asyncio
import json
import re
import sys
from typing import Any

import aiohttp
import pytest

from tests.services import eventually
from tests.vllm.vllm_cluster import ARGUMENTS, NEEDS_VLLM, PATIENCE_S, VllmCluster

pytestmark = NEEDS_VLLM
SCHEMA = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}},
    "required": ["ready"],
    "additionalProperties": False,
}


def text_of(body: dict[str, Any]) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


async def test_a_chat_is_answered_and_a_seed_decides_its_draws(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    answers = [
        await served.chat(http, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 1, 2)
    ]
    first, again, other = (text_of(body) for body in answers)
    assert first == again != other
    assert answers[0]["usage"]["completion_tokens"] == 12
    assert answers[0]["choices"][0]["finish_reason"] == "length"


async def test_an_adapter_answers_for_itself_and_shares_no_cached_block(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    answers = []
    for model in ("random", "adapted", "random", "adapted"):
        body = await served.chat(
            http, model=model, content="Once upon a time " * 40, temperature=0, ignore_eos=True
        )
        answers.append(text_of(body))
    assert answers[0] == answers[2] != answers[1] == answers[3]


async def test_log_probabilities_have_the_best_alternatives(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    body = await served.chat(http, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True)
    rows = body["choices"][0]["logprobs"]["content"]
    assert len(rows) == 12
    for row in rows:
        best = [each["logprob"] for each in row["top_logprobs"]]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert row["logprob"] == best[0] <= 0  # greedy


async def test_an_answer_follows_its_schema(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    body = await served.chat(http, response_format=wanted, temperature=1.0, seed=3, max_tokens=200)
    assert set(json.loads(text_of(body))) == {"ready"}


async def test_an_answer_ends_before_a_stop_token_and_before_a_stop_string(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    always = {"logit_bias": {"300": 100}, "temperature": 0}
    body = await served.chat(http, **always, max_tokens=6)
    whole = text_of(body)
    once = whole[: len(whole) // 6]
    assert whole == once * 6 != ""
    for stop in ({"stop_token_ids": [300]}, {"stop": [once * 2]}):
        body = await served.chat(http, **always, **stop)
        assert not text_of(body) and body["choices"][0]["finish_reason"] == "stop"


async def test_a_request_that_vllm_refuses_is_a_400_and_the_next_is_answered(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    await served.chat(http, status=400, content="word " * 3000)
    await served.chat(http, temperature=0)


@pytest.mark.parametrize("mode", ["agg", "decode"])
async def test_the_engine_passes_the_conformance_kit(served: VllmCluster, mode: str) -> None:
    options = ("--json", "--start-timeout-s", "300", "--generate-timeout-s", "60")
    target = ("tandem.vllm.engine:VllmEngine", str(served.model), "--disaggregation-mode", mode)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem.launch", "conformance", *options, *target, *ARGUMENTS,
        env=served.environment,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    results = json.loads(output[output.rindex(b'{\n  "engine"') :])["results"]
    failed = [each for each in results if each["outcome"] == "failed"]
    assert not failed and process.returncode == 0, failed


async def test_the_metrics_of_vllm_have_the_workers_labels(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    async with http.get(served.metrics) as answer:
        lines = (await answer.text()).splitlines()
    (running,) = (line for line in lines if line.startswith("vllm:num_requests_running{"))
    assert 'worker_id="' in running


async def test_tokens_are_allowed_and_words_left_out(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    found = (await served.chat(http, **fields, allowed_token_ids=[70, 71]))["choices"][0]
    assert set(found["token_ids"]) <= {70, 71}
    word = found["message"]["content"][:1]
    left_out = await served.chat(http, **fields, allowed_token_ids=[70, 71], bad_words=[word])
    assert word not in left_out["choices"][0]["message"]["content"]


async def test_an_engine_that_sleeps_answers_again_once_it_is_awake(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    async def command(name: str, **body: object) -> dict[str, Any]:
        url = served.metrics.replace("metrics", f"engine/control/{name}")
        async with http.post(url, json=body) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def is_ready() -> bool:
        async with http.get(f"{served.address}/v1/models/random/ready") as answer:
            return answer.status == 200

    async def is_away() -> bool:
        return not await is_ready()

    before = text_of(await served.chat(http, temperature=0))
    assert "--enable-sleep-mode" in (await command("sleep"))["message"]
    assert await is_ready()
    assert await command("sleep", level=0) == {"status": "ok", "is_sleeping": True}
    await eventually(is_away, PATIENCE_S)
    await command("reset_prefix_cache")
    assert await command("wake_up") == {"status": "ok", "is_sleeping": False}
    await eventually(is_ready, PATIENCE_S)
    assert text_of(await served.chat(http, temperature=0)) == before


# the last test of the served engine, which ends in it
async def test_a_terminated_engine_answers_first(
    served: VllmCluster, http: aiohttp.ClientSession
) -> None:
    body = {
        "model": "random", "messages": [{"role": "user", "content": "Go"}], "stream": True,
        "max_tokens": 200, "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with http.post(f"{served.address}/v1/chat/completions", json=body) as answer:
        await answer.content.readline()
        served.engine.terminate()
        rest = (await answer.content.read()).decode()
    assert '"completion_tokens":200' in rest.replace(" ", "") and "[DONE]" in rest, rest[-500:]
    assert await asyncio.to_thread(served.engine.wait, PATIENCE_S) == 0, served.log(1)
    # the answer filled a block, whose event the worker could read
    assert not re.search("Logging error|WARNING .*KV events", served.log(1)), served.log(1)
