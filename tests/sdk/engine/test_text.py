"""Bodies of text engines: every field reaches the engine, or is refused by name."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tandem.runtime.errors import InvalidRequestError
from tandem.sdk.engine.types import GenerateChunk, GenerateRequest
from tandem.sdk.engine_worker.text import text_answers, text_request
from tandem.sdk.wire.text_requests import text_chunk

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Context:
    """The part of a context that a text engine's answer needs."""

    def id(self) -> str:
        return "x"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_a_field_that_the_engine_does_not_read_is_refused_by_name(
    fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        text_request(CHAT | fields, "x")
    assert caught.value.param == name
    request = text_request(CHAT | fields, "x", frozenset(fields))
    assert request["body_fields"] == fields


def test_fields_without_a_meaning_are_not_refused() -> None:
    body = CHAT | {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "seed": 1, "user": "u",
        "response_format": {"type": "text"}, "logit_bias": None, "stream": True,
    }  # fmt: skip
    assert "body_fields" not in text_request(body, "x")


async def test_the_engine_gets_the_fields_it_reads_and_answers_calls() -> None:
    seen: list[GenerateRequest] = []

    async def answer(
        request: GenerateRequest, _context: Any
    ) -> AsyncGenerator[GenerateChunk, None]:
        seen.append(request)
        yield {"token_ids": [], "index": 0, "delta": {"reasoning_content": "Hm."}}
        yield {
            "token_ids": [],
            "index": 0,
            "delta": {"tool_calls": [CALL]},
            "finish_reason": "stop",
        }

    context: Any = Context()
    answered = text_answers(answer, ["tools"])(CHAT | {"tools": TOOLS}, context)
    chunks = [chunk async for chunk in answered]
    assert seen[0]["body_fields"] == {"tools": TOOLS}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"reasoning_content": "Hm."}, {"tool_calls": [CALL]}]


def test_a_delta_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="text"):
        text_chunk({"delta": "x"}, is_chat=True)
