"""The making of prompts: nothing of it stands in front of the streams of others."""

import asyncio
import threading
from typing import Any

import pytest

from tandem.frontend.generation import prompts
from tandem.frontend.tokens.tokenizer import NUM_THREADS, ModelText
from tests.frontend.bodies.test_bad_input import error_of
from tests.frontend.frontend_stack import Stack, model_files
from tests.services import eventually

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were tokenized."""
    texts: list[str] = []
    encode = ModelText.encode

    def noted(self: ModelText, text: str, *, is_chat: bool, param: str) -> list[int]:
        texts.append(text)
        return encode(self, text, is_chat=is_chat, param=param)

    monkeypatch.setattr(ModelText, "encode", noted)
    return texts


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    stack: Stack, encoded: list[str]
) -> None:
    long = "a" * 100_000
    answers = {
        "prompt": await stack.complete(prompt=long),
        "messages": await stack.chat(messages=[{"role": "user", "content": long}]),
    }
    for param, response in answers.items():
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "characters" in str(error["message"])
    assert encoded == []


async def test_arguments_of_calls_with_too_many_values_are_refused_before_they_are_read(
    stack: Stack,
) -> None:
    arguments = '{"a":[' + ",".join(["0"] * 2**17) + "]}"
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    hello = {"role": "user", "content": "Hi"}
    error = error_of(await stack.chat(messages=[hello, answer, answer, hello]))
    assert error["param"] == "messages[2].tool_calls"
    assert "and those before have over 262144 values" in str(error["message"])


async def test_a_prompt_that_is_too_long_ends_a_list_of_prompts(
    stack: Stack, encoded: list[str]
) -> None:
    response = await stack.complete(prompt=["é" * 200] * 50)
    assert error_of(response)["code"] == "context_length_exceeded"
    assert len(encoded) == 1


async def test_prompts_that_are_long_together_are_tokenized_beside_the_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_in_thread = 0
    in_thread = prompts.in_thread

    async def noted(model: Any, work: Any) -> Any:
        nonlocal num_in_thread
        num_in_thread += 1
        return await in_thread(model, work)

    monkeypatch.setattr(prompts, "in_thread", noted)
    assert (await stack.complete(prompt=["hello " * 10] * 100, max_tokens=1)).status_code == 200
    assert num_in_thread == 100


async def test_a_template_that_runs_on_costs_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompts, "_RENDER_S", 0.25)  # of CPU time: on a busy machine some seconds
    async with Stack(num_workers=0) as stack:
        await stack.add_worker(files=model_files(ENDLESS))
        await eventually(lambda: bool(stack.server.catalog.models))
        chat = asyncio.create_task(stack.chat())
        num_answered = 0
        while not chat.done():
            assert (await stack.http.get("/live")).status_code == 200
            num_answered += 1
        response = await chat
        assert response.status_code == 400 and "template" in str(error_of(response)["message"])
        assert num_answered > 5  # one or two if the template ran on the event loop


async def test_a_tokenizer_that_stands_still_costs_the_requests_of_its_own_model_only(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "INLINE_CHARACTERS", 0)
    slow = await stack.add_worker(model="slow", endpoint="a.b.c", files=model_files("{{ 1 }}"))
    await eventually(lambda: stack.num_known == 2)
    begun, go_on = threading.Semaphore(0), threading.Event()
    encode = ModelText.encode

    def stand_still(self: ModelText, text: str, *, is_chat: bool, param: str) -> list[int]:
        if text.startswith("stand"):
            begun.release()
            assert go_on.wait(60)
        return encode(self, text, is_chat=is_chat, param=param)

    monkeypatch.setattr(ModelText, "encode", stand_still)
    num_stuck = 2 * NUM_THREADS
    stuck = [
        asyncio.create_task(stack.complete(model="slow", prompt=f"stand {i}"))
        for i in range(num_stuck)
    ]
    try:
        for _ in range(NUM_THREADS):
            await asyncio.to_thread(begun.acquire)
        for _ in range(3):
            assert (await stack.complete(prompt="Hello")).status_code == 200
        assert not slow.requests and not any(each.done() for each in stuck)
    finally:
        go_on.set()
        answers = await asyncio.gather(*stuck)
    assert [each.status_code for each in answers] == [200] * num_stuck
    assert len(slow.requests) == num_stuck
