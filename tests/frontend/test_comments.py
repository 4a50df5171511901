"""Comments of a stream that waits for its first token."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from tandem.frontend.config import FrontendConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import UnavailableError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest, TextRequest
from tests.frontend.frontend_stack import ANSWER, MODEL, Stack, answer_with, sending
from tests.frontend.text.text_stack import TEXT_MODEL, add_text_worker, delta, says

COMMENT = ": waiting"
USER: Any = {"role": "user", "content": "Hi"}
BODIES = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 64},
}


@pytest.fixture
async def slow() -> AsyncIterator[Stack]:
    """A frontend that comments often, and a worker that waits for `proceed`."""
    async with Stack(config=FrontendConfig(port=0, comment_interval_s=0.02)) as stack:
        yield stack


def after(proceed: asyncio.Event, stack: Stack, *, fails: bool = False) -> None:
    """Have the worker answer, or fail, once the event is set."""
    answer = sending(error=RuntimeError("a bug")) if fails else answer_with(ANSWER)

    async def script(
        request: GenerateRequest, context: RequestContext, responder: Responder
    ) -> None:
        await proceed.wait()
        await answer(request, context, responder)

    stack.worker.script = script


async def lines_of(stack: Stack, path: str, proceed: asyncio.Event) -> list[str]:
    """The lines of a stream, whose worker proceeds after the second comment."""
    body = {"model": MODEL, "stream": True, **BODIES[path]}
    lines = []
    async with stack.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200 and "x-request-id" in response.headers
        assert "x-tandem-decode-instance" not in response.headers
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count(COMMENT) == 2:
                proceed.set()
    return lines


async def test_a_stream_without_an_event_has_comments_in_every_api(slow: Stack) -> None:
    for path in BODIES:
        proceed = asyncio.Event()
        after(proceed, slow)
        lines = await lines_of(slow, path, proceed)
        first = next(place for place, line in enumerate(lines) if line not in ("", COMMENT))
        assert lines[:3] == [COMMENT, "", COMMENT] and COMMENT not in lines[first:]
        texts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len(texts) > 3


async def test_an_error_after_a_comment_is_an_event(slow: Stack) -> None:
    for path in BODIES:
        proceed = asyncio.Event()
        after(proceed, slow, fails=True)
        lines = await lines_of(slow, path, proceed)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "error" in events[-1] or events[-1]["type"] == "response.failed"


async def test_the_official_clients_skip_comments(slow: Stack) -> None:
    slow.worker.script = waiting_a_moment
    async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none") as client:
        chunks = await client.chat.completions.create(model=MODEL, messages=[USER], stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(texts) == ANSWER
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            assert (await stream.get_final_response()).output_text == ANSWER
    async with (
        anthropic.AsyncAnthropic(base_url=slow.url, api_key="none") as claude,
        claude.messages.stream(model=MODEL, max_tokens=64, messages=[USER]) as message,
    ):
        assert (await message.get_final_text()) == ANSWER


async def waiting_a_moment(
    request: GenerateRequest, context: RequestContext, responder: Responder
) -> None:
    await asyncio.sleep(0.1)  # some comments; the answer is right without any too
    await answer_with(ANSWER)(request, context, responder)


async def test_a_whole_answer_and_an_error_in_time_are_as_without_comments(slow: Stack) -> None:
    slow.worker.script = waiting_a_moment
    response = await slow.chat()
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    assert response.headers["x-tandem-decode-instance"]
    assert (await slow.chat(stream=True, temperature=9)).status_code == 400


async def test_another_worker_of_a_text_model_can_still_answer_after_a_comment(
    slow: Stack,
) -> None:
    proceed = asyncio.Event()
    asked: list[str] = []

    async def script(request: TextRequest, context: RequestContext, responder: Responder) -> None:
        asked.append(request.request_id)
        await proceed.wait()
        if len(asked) == 1:
            raise UnavailableError("stopping")
        await says(delta("Hello", "stop"))(request, context, responder)

    for _ in range(2):
        await add_text_worker(slow, script)
    body = {"model": TEXT_MODEL, "stream": True, "messages": [USER]}
    lines = []
    async with slow.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            proceed.set()
    assert lines[0] == COMMENT and len(asked) == 2
    assert any('"content":"Hello"' in line for line in lines)
