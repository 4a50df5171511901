"""The timeline of a choice, for clients that ask for it and for no others."""

import openai
import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest, PrefillReport, TokenDelta, encode
from tests.frontend.frontend_stack import MODEL, Stack, choices_of, sending, token_ids

ASK = {"x-tandem-timeline": "true"}
TIMELINE = {"received": 0.0, "first_token": 8.25, "first_step": 10.5}
CHOICE_TIMELINE = {"prefill": "local", "timeline_ms": TIMELINE}


@pytest.fixture
def reporting(stack: Stack) -> Stack:
    """A stack whose worker reports the timeline of its requests, as real ones do."""
    first, second = token_ids("ab")
    last = TokenDelta([second], finish_reason="length", timeline_ms=TIMELINE)
    stack.worker.script = sending(TokenDelta([first]), last)
    return stack


async def test_a_client_that_did_not_ask_gets_no_timeline(reporting: Stack) -> None:
    for headers in ({}, {"x-tandem-timeline": "false"}):
        for stream in (False, True):
            response = await reporting.chat(stream=stream, headers=headers)
            assert response.status_code == 200
            assert "timeline" not in response.text and '"tandem"' not in response.text


async def test_every_choice_of_a_whole_answer_has_its_timeline(reporting: Stack) -> None:
    for ask in [Stack.chat, Stack.complete]:
        answer = (await ask(reporting, n=2, headers=ASK)).json()
        assert [choice["tandem"] for choice in answer["choices"]] == [
            CHOICE_TIMELINE,
            CHOICE_TIMELINE,
        ]


async def test_in_a_stream_the_last_chunk_of_a_choice_has_it(reporting: Stack) -> None:
    for ask in [Stack.chat, Stack.complete]:
        choices = choices_of(await ask(reporting, stream=True, headers=ASK))
        assert [choice.get("tandem") for choice in choices if choice["finish_reason"]] == [
            CHOICE_TIMELINE
        ]
        assert not any("tandem" in choice for choice in choices if not choice["finish_reason"])


async def test_the_prediction_of_the_first_token_stands_beside_its_time(stack: Stack) -> None:
    async def script(
        _request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        report = PrefillReport("local", "short", timeline_ms=TIMELINE, predicted_ms=7.5)
        responder.send(encode(TokenDelta(token_ids("a"), finish_reason="length", prefill=report)))

    stack.worker.script = script
    response = await stack.chat(headers=ASK)
    expected = CHOICE_TIMELINE | {"predicted_ms": 7.5}
    assert response.json()["choices"][0]["tandem"] == expected


async def test_a_choice_ended_by_a_stop_string_has_its_timeline_up_to_the_first_token(
    reporting: Stack,
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

    reporting.worker.script = script
    answer = (await reporting.chat(stop="b", headers=ASK)).json()
    assert answer["choices"][0]["tandem"] == {"prefill": "local", "timeline_ms": stages}


async def test_the_official_client_passes_the_extension_through(
    client: openai.AsyncOpenAI, reporting: Stack
) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_headers=ASK
    )
    assert answer.choices[0].model_extra == {"tandem": CHOICE_TIMELINE}


async def test_a_header_that_is_neither_true_nor_false_is_refused(reporting: Stack) -> None:
    response = await reporting.chat(headers={"x-tandem-timeline": "maybe"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-tandem-timeline"
