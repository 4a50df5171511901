"""The course of a request, for clients that ask for it and for no others."""

import openai
import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.messages import GenerateRequest, PrefillReport, TokenDelta, encode
from tandem.runtime.plane.server import Responder
from tests.frontend.frontend_stack import MODEL, REPORT, Stack, events_of, token_ids

ASK = {"x-tandem-timeline": "true"}
TIMELINE = {"received": 0.0, "first_token": 8.25, "first_step": 10.5}
COURSE = {"prefill": "local", "timeline_ms": TIMELINE}


@pytest.fixture
def told(stack: Stack) -> Stack:
    """Before a worker that tells the course of its requests, as real ones do."""

    async def script(
        _request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        first, second = token_ids("ab")
        responder.send(encode(TokenDelta([first], prefill=REPORT)))
        responder.send(encode(TokenDelta([second], finish_reason="length", timeline_ms=TIMELINE)))

    stack.worker.script = script
    return stack


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields


async def test_nobody_is_told_who_has_not_asked(told: Stack) -> None:
    for headers in ({}, {"x-tandem-timeline": "false"}):
        for stream in (False, True):
            body = chat_body(stream=stream)
            response = await told.http.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 200
            assert "timeline" not in response.text and '"tandem"' not in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_choice_of_a_whole_answer_tells_its_course(told: Stack, path: str) -> None:
    body = chat_body(n=2) if "chat" in path else {"model": MODEL, "prompt": "Hi", "n": 2}
    answer = (await told.http.post(path, json=body, headers=ASK)).json()
    assert [choice["tandem"] for choice in answer["choices"]] == [COURSE, COURSE]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_in_a_stream_the_last_chunk_of_a_choice_tells_it(told: Stack, path: str) -> None:
    body = chat_body(stream=True) if "chat" in path else {"model": MODEL, "prompt": "Hi"}
    response = await told.http.post(path, json=body | {"stream": True}, headers=ASK)
    choices = [choice for event in events_of(response) for choice in event["choices"]]
    assert [choice.get("tandem") for choice in choices if choice["finish_reason"]] == [COURSE]
    assert not any("tandem" in choice for choice in choices if not choice["finish_reason"])


async def test_what_a_stop_string_ended_tells_its_course_up_to_the_first_token(
    told: Stack,
) -> None:
    """The worker did not know yet; its first delta had what there was."""
    stages = {"received": 0.0, "first_token": 8.25}

    async def script(
        _request: GenerateRequest, context: RequestContext, responder: Responder
    ) -> None:
        report = PrefillReport("local", "short", timeline_ms=stages)
        responder.send(encode(TokenDelta(token_ids("ab"), prefill=report)))
        await context.cancelled()
        context.raise_if_done()

    told.worker.script = script
    body = chat_body(stop="b")
    answer = (await told.http.post("/v1/chat/completions", json=body, headers=ASK)).json()
    assert answer["choices"][0]["tandem"] == {"prefill": "local", "timeline_ms": stages}


async def test_the_official_client_passes_the_extension_through(told: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{told.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_headers=ASK
        )
    assert answer.choices[0].model_extra == {"tandem": COURSE}


async def test_a_wish_that_is_neither_yes_nor_no_is_refused(told: Stack) -> None:
    response = await told.http.post(
        "/v1/chat/completions", json=chat_body(), headers={"x-tandem-timeline": "maybe"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-tandem-timeline"
