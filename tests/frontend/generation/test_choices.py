"""Several choices, batches of prompts, log probabilities, and what reaches the worker."""

from array import array

import pytest

from tandem.frontend.generation.plan import derived_seed
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import (
    GenerateRequest,
    ModelFiles,
    SamplingParams,
    StopConditions,
    Targets,
    TokenDelta,
    TokenLogprobs,
    encode,
    pack_tokens,
)
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs
from tests.frontend.frontend_stack import (
    ANSWER,
    MODEL,
    REPORT,
    Script,
    Stack,
    byte_level_tokenizer,
    choices_of,
    events_of,
    model_files,
    prompt_tokens,
    sending,
    text_of,
    token_ids,
)
from tests.frontend.tokens.test_detokenizer import sentencepiece_like
from tests.services import eventually


async def echo_prompt(
    request: GenerateRequest, _context: RequestContext, responder: Responder
) -> None:
    """Answers with the prompt's own tokens."""
    ids = prompt_tokens(request)
    responder.send(encode(TokenDelta(ids[:1], prefill=REPORT)))
    responder.send(encode(TokenDelta(ids[1:], finish_reason="length")))


def two_tokens_with_logprobs() -> Script:
    first, second = token_ids("a") + token_ids("b")
    top = [(first, -0.25), (second, -9999.0)]
    return sending(
        TokenDelta([first], logprobs=[TokenLogprobs(-0.25, top)]),
        TokenDelta([second], finish_reason="length", logprobs=[TokenLogprobs(-1.5, [])]),
    )


async def test_every_sampling_field_reaches_the_worker(stack: Stack) -> None:
    response = await stack.http.post(
        "/v1/chat/completions",
        headers={
            "x-tandem-prefill": "remote", "x-tandem-ttft-target-ms": "250",
            "traceparent": "00-ab-cd-01",
        },
        json={
            "model": MODEL, "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
            "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
            "logit_bias": {"5": -100}, "seed": -1, "logprobs": True, "top_logprobs": 3,
            "min_tokens": 2, "stop_token_ids": [8], "ignore_eos": True, "cache_salt": "tenant",
        },
    )  # fmt: skip
    assert response.status_code == 200, response.text
    (request,) = stack.worker.requests
    assert request.sampling == SamplingParams(
        0.5, 0.9, 7, 0.1, 1.0, -1.0, 1.5, {5: -100.0}, 2**64 - 1, 3
    )
    assert request.stop == StopConditions(9, 2, [8], True)
    assert request.cache_salt == "tenant" and request.prefill_place == "remote"
    assert request.targets == Targets(ttft_ms=250.0)
    assert 0 < request.deadline_ms <= 600_000
    assert stack.worker.contexts[0].headers == {"traceparent": "00-ab-cd-01"}


async def test_defaults_are_openais_and_the_seed_is_random(stack: Stack) -> None:
    await stack.chat()
    await stack.chat()
    first, second = stack.worker.requests
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling == SamplingParams(seed=first.sampling.seed)
    assert first.stop.max_tokens == 128 - len(prompt_tokens(first))  # what the context leaves
    await stack.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})
    assert stack.worker.requests[-1].stop.max_tokens == 16


async def test_a_nucleus_without_mass_takes_the_likeliest_token(stack: Stack) -> None:
    assert (await stack.chat(top_p=0, temperature=1.5)).status_code == 200
    (request,) = stack.worker.requests
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize("prompt", ["", [""], ["", "Hi"]])
async def test_an_empty_prompt_is_the_start_of_a_text(
    stack: Stack, prompt: str | list[str]
) -> None:
    response = await stack.complete(prompt=prompt)
    assert response.status_code == 200, response.text
    start = byte_level_tokenizer().token_to_id("<|im_end|>")  # the model has no other
    assert [start] in [prompt_tokens(request) for request in stack.worker.requests]


async def test_choices_have_derived_seeds_and_the_first_the_seed_itself(stack: Stack) -> None:
    response = await stack.chat(n=3, seed=11)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in choices} == {ANSWER}
    seeds = {request.sampling.seed for request in stack.worker.requests}
    assert seeds == {11, derived_seed(11, 1), derived_seed(11, 2)}
    usage = response.json()["usage"]
    assert usage["completion_tokens"] == 3 * (len(token_ids(ANSWER)) + 1)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2  # the prompt is counted once


async def test_streamed_choices_are_told_apart_by_their_index(stack: Stack) -> None:
    response = await stack.chat(n=2, stream=True, stream_options={"include_usage": True})
    events = events_of(response)
    texts = {0: "", 1: ""}
    reasons = {}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: ANSWER, 1: ANSWER} and reasons == {0: "stop", 1: "stop"}
    assert events[-1]["usage"]["completion_tokens"] == 2 * (len(token_ids(ANSWER)) + 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_batch_of_prompts_is_answered_prompt_by_prompt(
    stack: Stack, stream: bool, as_ids: bool
) -> None:
    stack.worker.script = echo_prompt
    texts = ["Hello", "wörld"]
    prompt = [token_ids(text) for text in texts] if as_ids else texts
    response = await stack.complete(prompt=prompt, n=2, seed=5, stream=stream)
    answers = dict.fromkeys(range(4), "")
    for choice in choices_of(response):
        answers[choice["index"]] += choice["text"]
    assert answers == {0: "Hello", 1: "Hello", 2: "wörld", 3: "wörld"}
    by_prompt = {tuple(prompt_tokens(r)): set() for r in stack.worker.requests}
    for request in stack.worker.requests:
        by_prompt[tuple(prompt_tokens(request))].add(request.sampling.seed)
    assert list(by_prompt.values()) == [{5, derived_seed(5, 1)}] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(stack: Stack, stream: bool) -> None:
    response = await stack.complete(prompt="Say: ", echo=True, stream=stream)
    assert text_of(response) == "Say: " + ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_the_space_between_prompt_and_answer_is_kept(stream: bool) -> None:
    """By a SentencePiece tokenizer, which drops a space at the start of a text."""
    tokenizer = sentencepiece_like()
    answer = tokenizer.encode("Hello world").ids[len(tokenizer.encode("Hello").ids) :]

    world = sending(TokenDelta(answer, finish_reason="length"))
    files = model_files().files | {"tokenizer.json": tokenizer.to_str().encode()}
    async with Stack(num_workers=0) as stack:
        await stack.add_worker(files=ModelFiles(files), script=world)
        await eventually(lambda: bool(stack.server.catalog.models))
        response = await stack.complete(prompt="Hello", echo=True, stream=stream)
        assert text_of(response) == "Hello world"


async def test_text_parts_of_a_message_are_joined(stack: Stack) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}]
    assert (await stack.chat(messages=messages)).status_code == 200
    assert prompt_tokens(stack.worker.requests[0]) == token_ids(
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_chat(stack: Stack, stream: bool) -> None:
    stack.worker.script = two_tokens_with_logprobs()
    response = await stack.chat(logprobs=True, top_logprobs=2, stream=stream)
    listed = [choice["logprobs"] for choice in choices_of(response) if choice["logprobs"]]
    content = [token for part in listed for token in part["content"]]
    assert [token["token"] for token in content] == ["a", "b"]
    assert [token["logprob"] for token in content] == [-0.25, -1.5]
    assert content[0]["bytes"] == [97]
    assert [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]] == [
        ("a", -0.25),
        ("b", -9999.0),
    ]


async def scored(request: GenerateRequest, _context: RequestContext, responder: Responder) -> None:
    """Gives the token at position i of the prompt -i, and -100 to others beside it."""
    ids, num_top = prompt_tokens(request), request.sampling.logprobs or 0
    rows, others = range(1, len(ids)), range(num_top)
    scores = PromptLogprobs(
        num_top,
        array("f", [-row for row in rows]).tobytes(),
        pack_tokens([token for row in rows for token in (ids[row], *others)[:num_top]]),
        array("f", [-100 if other else -row for row in rows for other in others]).tobytes(),
    )
    own = [TokenLogprobs(-0.5, [(ids[0], -0.5)][:num_top])]
    has_answer = request.stop.max_tokens > 0
    delta = TokenDelta(
        [],
        "stop" if has_answer else "length",
        own if has_answer else None,
        REPORT,
        stop_token_id=ids[0] if has_answer else None,
        prompt_logprobs=scores,
    )
    responder.send(encode(delta))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echoed_prompt_is_scored(stack: Stack, stream: bool, max_tokens: int) -> None:
    stack.worker.script = scored
    response = await stack.complete(
        prompt="abc", echo=True, logprobs=2, max_tokens=max_tokens, stream=stream
    )
    choices = choices_of(response)
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == max_tokens
    assert "".join(choice["text"] for choice in choices) == "abc"
    listed = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    found = {key: [each for part in listed for each in part[key]] for key in listed[0]}
    first = byte_level_tokenizer().id_to_token(0)
    assert found["tokens"] == ["a", "b", "c", "a"][: 3 + max_tokens]
    assert found["token_logprobs"] == [None, -1, -2, -0.5][: 3 + max_tokens]
    assert found["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]
    assert found["top_logprobs"] == [
        None, {"b": -1, first: -100}, {"c": -2, first: -100}, {"a": -0.5}
    ][: 3 + max_tokens]  # fmt: skip
    assert choices[-1]["finish_reason"] == ("stop" if max_tokens else "length")
    [request] = stack.worker.requests
    assert (request.stop.max_tokens, request.sampling.prompt_logprobs) == (max_tokens, True)


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_each_choice_of_each_prompt_is_scored(stack: Stack, logprobs: int) -> None:
    stack.worker.script = scored
    body = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": logprobs, "max_tokens": 0}
    choices = (await stack.complete(**body)).json()["choices"]
    values = [choice["logprobs"]["token_logprobs"] for choice in choices]
    assert values == [[None, -1], [None, -1], [None], [None]]
    assert (choices[0]["logprobs"]["top_logprobs"] is None) == (logprobs == 0)


async def test_tokens_of_one_text_have_the_probability_of_the_best(stack: Stack) -> None:
    """Of characters in pieces, which are all the same text."""
    first, second = token_ids("ö")
    top = [(first, -0.25), (second, -3.0)]
    stack.worker.script = sending(TokenDelta([first], "length", [TokenLogprobs(-0.25, top)]))
    listed = (await stack.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert list(listed["top_logprobs"][0].values()) == [-0.25]


async def test_a_worker_that_leaves_the_scores_out_is_not_believed(stack: Stack) -> None:
    response = await stack.complete(echo=True, logprobs=1)
    assert response.status_code == 502


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion(stack: Stack, stream: bool) -> None:
    stack.worker.script = two_tokens_with_logprobs()
    response = await stack.complete(logprobs=2, stream=stream)
    listed = [choice["logprobs"] for choice in choices_of(response) if choice["logprobs"]]
    assert [t for part in listed for t in part["tokens"]] == ["a", "b"]
    assert [o for part in listed for o in part["text_offset"]] == [0, 1]
    assert listed[0]["top_logprobs"][0] == {"a": -0.25, "b": -9999.0}
