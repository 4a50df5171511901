"""Log probabilities of a response's text."""

from typing import Any

import openai
import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest, TokenDelta, encode
from tests.frontend.frontend_stack import (
    ANSWER,
    MODEL,
    REPORT,
    Script,
    Stack,
    answer_with,
    token_ids,
)
from tests.frontend.generation.cut_answers import logprobs_at, telling
from tests.frontend.grammar_worker import GrammarWorker
from tests.frontend.responses.test_responses import events_of, respond
from tests.frontend.test_tools import CALL

INCLUDE = {"include": ["message.output_text.logprobs"]}


WORKER = GrammarWorker


def in_one_delta(text: str) -> Script:
    """Answers with all tokens and their logprobs at once, the token that ends them included."""

    async def script(
        request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        ids = token_ids(text)
        logprobs = list(map(logprobs_at, range(len(ids) + 1)))
        responder.send(encode(TokenDelta(ids, "stop", logprobs, REPORT, 0)))

    return script


def joined(listed: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(each["bytes"]) for each in listed)


def texts_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [each for each in response["output"] if each["type"] == "message"]
    return [part for each in messages for part in each["content"]]


@pytest.mark.parametrize("script", [telling, in_one_delta])
async def test_the_tokens_of_a_text_are_those_it_is_made_of(stack: Stack, script: Any) -> None:
    stack.worker.script = script(ANSWER)
    response = (await respond(stack, **INCLUDE, top_logprobs=2)).json()
    (part,) = texts_of(response)
    assert part["text"] == ANSWER and joined(part["logprobs"]) == ANSWER.encode()
    assert [each["logprob"] for each in part["logprobs"]] == [
        -0.01 * index for index in range(len(token_ids(ANSWER)))
    ]
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {2}
    assert response["top_logprobs"] == 2
    assert stack.worker.requests[-1].sampling.logprobs == 2


@pytest.mark.parametrize("script", [telling, in_one_delta])
async def test_deltas_have_their_tokens_and_the_end_has_all(stack: Stack, script: Any) -> None:
    stack.worker.script = script(ANSWER)
    events = events_of(await respond(stack, **INCLUDE, stream=True))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    listed = [token for each in deltas for token in each["logprobs"]]
    assert len(deltas) > 3 and joined(listed) == ANSWER.encode()
    assert all(joined(each["logprobs"]) == each["delta"].encode() for each in deltas)
    (done,) = [each for each in events if each["type"] == "response.output_text.done"]
    (part,) = texts_of(events[-1]["response"])
    assert done["logprobs"] == part["logprobs"] == listed


@pytest.mark.parametrize("script", [telling, in_one_delta])
async def test_reasoning_and_calls_have_no_tokens_in_the_text(stack: Stack, script: Any) -> None:
    stack.worker.script = script(f"Hm.\n</think>\n\nI look.{CALL}")
    tool = {"type": "function", "name": "weather"}
    response = (await respond(stack, **INCLUDE, reasoning={"effort": "low"}, tools=[tool])).json()
    assert [each["type"] for each in response["output"]] == [
        "reasoning", "message", "function_call",
    ]  # fmt: skip
    (part,) = texts_of(response)
    assert part["text"] == "I look." and joined(part["logprobs"]) == b"I look."
    assert "logprobs" not in response["output"][0]["content"][0]


async def test_nothing_is_listed_that_is_not_asked_for(stack: Stack) -> None:
    stack.worker.script = answer_with(ANSWER)
    response = await respond(stack, top_logprobs=2)
    assert response.headers["x-tandem-ignored"] == "top_logprobs"
    assert texts_of(response.json())[0]["logprobs"] == []
    assert response.json()["top_logprobs"] == 0
    assert stack.worker.requests[-1].sampling.logprobs is None


async def test_too_many_are_refused(stack: Stack) -> None:
    response = await respond(stack, **INCLUDE, top_logprobs=21)
    assert response.status_code == 400 and response.json()["error"]["param"] == "top_logprobs"


async def test_the_official_client_reads_them(stack: Stack, client: openai.AsyncOpenAI) -> None:
    stack.worker.script = telling(ANSWER)
    response = await client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part: Any = response.output[0].content[0]  # type: ignore[union-attr]
    assert b"".join(bytes(each.bytes) for each in part.logprobs) == ANSWER.encode()
    assert len(part.logprobs[0].top_logprobs) == 2
