"""Answers of the whole stack: of each API, place, policy and cache, and while parts of it die."""

import asyncio
import contextlib
import io
import json
import random
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.explain import explain, run_explain
from tandem.runtime.errors import NotFoundError
from tandem.runtime.wire.explain_messages import PromptExplanation
from tests.config.configs import config_of
from tests.e2e.cluster import Answer, Cluster
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
PENALIZED = {
    "temperature": 0.7, "seed": 7, "top_k": 40, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}  # fmt: skip
ID_HEADER = "x-tandem-request-id"
LONG = 1200  # tokens; disagg.max_local_prefill_length is 1000
QUESTIONS = ["Hello!", "What is the capital of France?", "Tell me a story about a fox."]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=cluster.base_url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.mark.parametrize("place", ["local", "remote"])
async def test_one_question_has_one_answer_in_every_api(
    client: openai.AsyncOpenAI, cluster: Cluster, place: str
) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    headers = {"x-tandem-prefill": place}
    common: Any = {"model": cluster.model_name, "temperature": 0, "extra_headers": headers}
    raw = await client.chat.completions.with_raw_response.create(
        messages=question, max_tokens=30, **common
    )
    chat = raw.parse()
    text = chat.choices[0].message.content
    assert raw.headers["x-tandem-prefill"] == place and "capital" in text
    assert chat.choices[0].finish_reason == "stop"
    async with client.responses.stream(input=question, max_output_tokens=30, **common) as stream:
        response = await stream.get_final_response()
    assert response.output_text == text and response.status == "completed"
    async with (
        anthropic.AsyncAnthropic(base_url=cluster.base_url, api_key="none") as other,
        other.messages.stream(
            model=cluster.model_name,
            messages=question,
            max_tokens=30,
            extra_headers=headers,
            extra_body={"temperature": 0},
        ) as messages,
    ):
        message = await messages.get_final_message()
    assert message.content[0].type == "text" and message.content[0].text == text
    assert chat.usage is not None and response.usage is not None
    assert chat.usage.completion_tokens == response.usage.output_tokens
    assert message.usage.output_tokens == response.usage.output_tokens
    answer = await client.responses.create(
        input="And of Italy?", previous_response_id=response.id, max_output_tokens=30, **common
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens > response.usage.total_tokens


def blocks_of(page: str, title: str, cluster: Cluster) -> list[str]:
    """Return the blocks of a page's section, with the address of the cluster in them."""
    whole = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(r"\n##+ ", whole.split(f"# {title}\n")[1])[0]
    blocks = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return [block.replace("http://127.0.0.1:8000", cluster.base_url) for block in blocks]


async def test_the_tool_call_of_the_readme_answers_as_the_page_shows(cluster: Cluster) -> None:
    command, shown = blocks_of("README.md", "A tool call", cluster)
    words = shlex.split(command)
    async with cluster.http.post(words[1], json=json.loads(words[-1])) as response:
        answer = await response.json()
    (choice,), expected = answer["choices"], json.loads(shown)
    assert choice["finish_reason"] == "tool_calls"
    for message in (choice["message"], expected):
        assert message["tool_calls"][0].pop("id").startswith("call_")
    assert choice["message"] == expected


async def test_the_program_with_a_tool_prints_its_comments(cluster: Cluster) -> None:
    (program,) = blocks_of("docs/http-api.md", "Tools and reasoning", cluster)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        await asyncio.to_thread(exec, program, {})
    shown = re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)
    assert len(shown) == 2 and printed.getvalue().splitlines() == shown


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_the_bundled_model_calls_a_tool_and_answers_from_the_result_in_streams(
    client: openai.AsyncOpenAI, cluster: Cluster, choice: Any
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    common: Any = {"model": cluster.model_name, "tools": [WEATHER], "temperature": 0}
    async with client.chat.completions.stream(
        messages=messages, tool_choice=choice, **common
    ) as stream:
        first = (await stream.get_final_completion()).choices[0]
    (call,) = first.message.tool_calls or []
    assert (first.finish_reason, first.message.content or "") == ("tool_calls", "")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "windy"}'}
    messages += [first.message.model_dump(exclude_none=True), result]
    async with client.chat.completions.stream(messages=messages, **common) as stream:
        last = (await stream.get_final_completion()).choices[0]
    assert last.finish_reason == "stop"
    assert {"windy", "Rome"} <= set(re.findall(r"\w+", last.message.content or ""))


@pytest.mark.parametrize(
    "option", [{"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
async def test_the_bundled_model_streams_its_reasoning_before_its_answer(
    client: openai.AsyncOpenAI, cluster: Cluster, option: dict[str, Any]
) -> None:
    parts: list[tuple[str, str]] = []
    async for chunk in await client.chat.completions.create(
        model=cluster.model_name,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
        extra_body=option,
    ):
        delta = chunk.choices[0].delta
        reasoning = getattr(delta, "reasoning_content", None)
        parts += [(kind, text) for kind, text in (("r", reasoning), ("c", delta.content)) if text]
    kinds = "".join(kind for kind, _ in parts)
    thought, answer = ("".join(text for each, text in parts if each == kind) for kind in "rc")
    assert re.fullmatch("r+c+", kinds)  # in few chunks where the frontend waits for a core
    assert "What is the capital of France?" in thought and "think>" not in thought + answer
    assert "Paris" in answer


def words(num_words: int, seed: int) -> str:
    draw = random.Random(seed)
    vocabulary = ["the", "fox", "ran", "over", "green", "hills", "and", "saw", "an", "old", "house"]
    return " ".join(draw.choice(vocabulary) for _ in range(num_words))


def asking(place: str) -> dict[str, dict[str, str]]:
    return {"headers": {"x-tandem-prefill": place}}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "all"])
async def test_local_and_remote_give_the_same_text(
    cluster: Cluster, sampling: dict[str, object]
) -> None:
    async def both(question: str) -> None:
        texts = []
        for place in ("local", "remote"):
            # a salt of its own: nothing is shared with the other runs
            salt = f"{place} {sampling}"
            answer = await cluster.chat(
                question, max_tokens=40, cache_salt=salt, **sampling, **asking(place)
            )
            assert (answer.status, answer.place) == (200, place)
            texts.append(answer.text)
        assert texts[0] == texts[1] and texts[0]

    await asyncio.gather(*[both(question) for question in QUESTIONS])


async def test_every_policy_gives_the_same_text(cluster: Cluster) -> None:
    prompts = [words(n, seed=n) for n in (5, 90, 400)]
    texts: dict[str, list[str]] = {}
    await cluster.set_config("disagg.max_local_prefill_length", 200)
    for policy in ("always_local", "always_remote", "threshold", "adaptive"):
        await cluster.set_config("disagg.policy", policy)
        answers = [
            await cluster.complete(prompt, max_tokens=24, cache_salt=policy, **options)
            for prompt in prompts
            for options in (GREEDY, SEEDED)
        ]
        texts[policy] = [answer.text for answer in answers]
        if policy != "adaptive":
            places = [answer.place for answer in answers[::2]]
            expected = {
                "always_local": ["local"] * 3,
                "always_remote": ["remote"] * 3,
                "threshold": ["local", "local", "remote"],
            }
            assert places == expected[policy]
    assert all(these == texts["always_local"] for these in texts.values())
    await cluster.set_config("disagg.max_local_prefill_length", 1000)


@pytest.mark.parametrize("place", ["local", "remote"])
async def test_a_prefix_hit_changes_nothing_but_the_work(cluster: Cluster, place: str) -> None:
    prompt = words(150, seed=99)
    options = {"max_tokens": 16, "cache_salt": place, **GREEDY, **asking(place)}
    cold = await cluster.complete(prompt, **options)
    warm = await cluster.complete(prompt, **options)
    assert cold.text == warm.text
    assert cold.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_cached = warm.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    num_prompt = warm.body["usage"]["prompt_tokens"]
    assert num_cached % 16 == 0 and num_prompt - 16 <= num_cached < num_prompt


async def test_a_longer_prompt_reuses_the_blocks_of_a_shorter_one(cluster: Cluster) -> None:
    head, tail = words(120, seed=5), words(60, seed=6)
    undisturbed = await cluster.complete(head + " " + tail, max_tokens=16, cache_salt="a", **GREEDY)
    await cluster.complete(head, max_tokens=4, cache_salt="b", **GREEDY, **asking("local"))
    partly_cached = await cluster.complete(
        head + " " + tail, max_tokens=16, cache_salt="b", **GREEDY, **asking("remote")
    )
    assert partly_cached.text == undisturbed.text
    assert partly_cached.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_logprobs_are_the_same_from_both_sides(cluster: Cluster) -> None:
    answers = [
        await cluster.complete(
            words(40, seed=3),
            max_tokens=6,
            ignore_eos=True,
            logprobs=3,
            cache_salt=place,
            **GREEDY,
            **asking(place),
        )
        for place in ("local", "remote")
    ]
    local, remote = (answer.body["choices"][0]["logprobs"] for answer in answers)
    assert local["tokens"] == remote["tokens"] and len(local["tokens"]) == 6
    assert local["token_logprobs"] == pytest.approx(remote["token_logprobs"], abs=1e-4)


def config_of_cluster(cluster: Cluster) -> EffectiveConfig:
    named = {"nats_url": cluster.nats.url, "etcd_endpoints": cluster.etcd.url, "namespace": "test"}
    return config_of(*(f"--runtime.{name}={value}" for name, value in named.items()))


async def told(cluster: Cluster, answer: Answer) -> list[PromptExplanation]:
    return await explain(config_of_cluster(cluster), answer.headers[ID_HEADER])


async def test_an_explained_request_has_every_place_that_was_considered_and_what_came(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    instances = {each.instance_id: each.component for each in await cluster.instances()}
    [decoder] = (name for name, component in instances.items() if component == "decode")
    [prefiller] = (name for name, component in instances.items() if component == "prefill")

    async def long_prompt() -> tuple[Answer, PromptExplanation]:
        answer = await cluster.complete([draw.randrange(3, 1000) for _ in range(LONG)])
        [found] = await told(cluster, answer)
        return answer, found

    answer, found = await long_prompt()
    while not found.routed or len(found.considered) < 2:  # reports of loads are to come
        answer, found = await long_prompt()
    [routed] = found.routed
    assert routed.instance_id == found.decode_instance == decoder
    assert routed.fits and 0 < routed.first_token_ms <= routed.cost_ms
    assert (found.num_prompt_tokens, found.outcome) == (LONG, "finished")
    here, there = found.considered
    assert (here.place, here.instance_id) == ("local", found.decode_instance)
    assert (there.place, there.instance_id) == ("remote", prefiller)
    for place in (here, there):
        parts = place.wait_ms + place.compute_ms + place.transfer_ms
        assert 0 < parts == pytest.approx(place.first_token_ms)
    assert found.last_place == answer.place
    assert found.last_reason == answer.headers["x-tandem-prefill-reason"]
    assert found.timeline_ms["first_token"] > 0

    several = await cluster.complete("Once", n=2, max_tokens=2)
    both = await told(cluster, several)
    assert [each.cause for each in both] == ["short"] * 2  # no other place is predicted
    assert [len(each.considered) for each in both] == [1, 1]

    config, request_id = config_of_cluster(cluster), answer.headers[ID_HEADER]
    await asyncio.to_thread(run_explain, config, request_id, as_json=False)
    text = capsys.readouterr().out
    assert f"decided: {found.place} ({found.cause}): {found.reason}" in text
    assert prefiller[:8] in text and decoder[:8] in text
    await asyncio.to_thread(run_explain, config, request_id, as_json=True)
    [same] = json.loads(capsys.readouterr().out)
    assert [each["instance_id"] for each in same["routed"]] == [decoder]

    with pytest.raises(NotFoundError, match=r"no decode worker .*1 asked.* 'nobody'"):
        await explain(config, "nobody")


# ---- parts that die ------------------------------------------------------------------------------


async def ask(cluster: Cluster, seed: int, place: str, num_tokens: int = 100) -> Answer:
    return await cluster.complete(
        random.Random(seed).choices(range(3, 1000), k=num_tokens),
        max_tokens=12,
        cache_salt=f"{time.monotonic_ns()}",
        **GREEDY,
        **asking(place),
    )


async def caught_in_the_act(cluster: Cluster, seed: int) -> asyncio.Task[Answer]:
    """A long prompt that a prefill worker computes now. On a fast machine it takes some tries."""
    while True:
        asking = asyncio.create_task(ask(cluster, seed, "remote", LONG))
        while not asking.done():
            if any(w.details["num_jobs"] for w in await cluster.statuses("prefill")):
                return asking
        assert (await asking).place == "remote"


async def test_the_end_of_a_prefill_worker_costs_time_and_nothing_else(cluster: Cluster) -> None:
    undisturbed = await ask(cluster, 5, "local", LONG)
    asking = await caught_in_the_act(cluster, 5)
    cluster.send_signal("prefill0", signal.SIGKILL)
    answer = await asking
    assert (answer.status, answer.text) == (200, undisturbed.text)
    await cluster.end("prefill0")
    await cluster.start("prefill0", "prefill")
    await cluster.ready(1, 1)
    await cluster.remote_works()
    await cluster.balanced()


async def test_losing_nats_keeps_streams_going_and_prompts_local(cluster: Cluster) -> None:
    streaming = asyncio.create_task(
        cluster.complete([5, 6, 7], max_tokens=2000, ignore_eos=True, stream=True, temperature=0)
    )
    undisturbed = await ask(cluster, 6, "local")
    child = cluster.nats.child
    child.kill()
    await child.wait()

    async def is_local() -> bool:
        answer = await ask(cluster, 6, "remote")
        assert (answer.status, answer.text) == (200, undisturbed.text)
        return answer.place == "local"

    await eventually(is_local, pause_s=0.2)
    await cluster.nats.restart(empty=True)
    await cluster.remote_works()
    streamed = await streaming
    assert streamed.status == 200 and streamed.chunks[-1]["choices"][0]["finish_reason"] == "length"
    await cluster.balanced()


async def test_losing_etcd_stops_nothing_and_everyone_comes_back(cluster: Cluster) -> None:
    child = cluster.etcd.child
    child.kill()
    await child.wait()
    for place in ("local", "remote"):
        answer = await ask(cluster, 7, place)
        assert (answer.status, answer.place) == (200, place)
    await cluster.etcd.restart(empty=True)
    await cluster.ready(1, 1)
    await cluster.set_config("disagg.max_local_prefill_length", 900)
    await cluster.remote_works()


async def test_the_pools_balance_afterwards(cluster: Cluster) -> None:
    await cluster.balanced()
