"""The Responses API over HTTP, with the official client where it matters."""

import json
from typing import Any

import httpx
import openai
import pytest

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.outline import MAX_CONTENT_PARTS
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.answer_format import AnswerFormat
from tandem.frontend.responses.items import Reading
from tandem.runtime.errors import InvalidRequestError
from tests.frontend.frontend_stack import (
    ANSWER,
    MODEL,
    Stack,
    answer_with,
    one_token_then_fail,
    prompt_of,
    prompt_tokens,
    token_ids,
)
from tests.frontend.parsers.test_pieces import LetterParser


async def respond(stack: Stack, **fields: object) -> httpx.Response:
    return await stack.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | fields)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream: names, numbers and the end are checked."""
    *blocks, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        events.append(event)
    return events


async def test_the_client_reads_a_whole_response(client: openai.AsyncOpenAI, stack: Stack) -> None:
    response = await client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert response.output_text == ANSWER and response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt_tokens(stack.worker.requests[0]))
    assert response.usage.output_tokens == len(token_ids(ANSWER)) + 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert prompt_of(stack.worker.requests[0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_the_client_reads_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="Hi") as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == ANSWER == final.output_text and len(deltas) > 3


async def test_a_stream_has_the_events_of_the_specification_in_their_order(stack: Stack) -> None:
    events = events_of(await respond(stack, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    final = events[-1]["response"]
    (item,) = final["output"]
    assert events[-2]["item"] == item
    assert item["content"] == [
        {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    ]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


async def test_reasoning_text_and_calls_are_items_of_their_own(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerFormat, "new_parser", lambda *_: LetterParser())
    stack.worker.script = answer_with("~hm, ~hello f:x f:y")
    fields: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    whole = (await respond(stack, **fields)).json()
    events = events_of(await respond(stack, stream=True, **fields))
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, "}]
    assert message["content"][0]["text"] == "hello "
    assert (first["name"], first["arguments"], first["call_id"]) == ("f", "x ", "call_0")
    assert (second["arguments"], second["status"]) == ("y.", "completed")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    closed = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == closed
    shapes = [{**item, "id": ""} for item in whole["output"]]
    assert [{**item, "id": ""} for item in closed] == shapes
    for index, item in enumerate(closed):
        of_item = [e for e in events if e.get("output_index") == index]
        grown = "".join(e["delta"] for e in of_item if e["type"].endswith(".delta"))
        assert grown == (item.get("arguments") or item["content"][0]["text"])


async def test_an_answer_that_is_cut_is_incomplete(stack: Stack) -> None:
    events = events_of(await respond(stack, stream=True, max_output_tokens=2))
    assert events[-1]["type"] == "response.incomplete"
    final = events[-1]["response"]
    assert final["status"] == "incomplete" and final["completed_at"] is None
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete"


async def test_an_error_in_a_stream_fails_the_response(stack: Stack) -> None:
    stack.worker.script = one_token_then_fail
    response = await respond(stack, stream=True)
    last = events_of(response)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert "error id" in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["content"][0]["text"] == "H"
    assert (await stack.http.get(f"/v1/responses/{last['response']['id']}")).status_code == 404


async def test_a_response_can_be_continued_fetched_and_deleted(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    stack.worker.script = answer_with("One")
    first = await client.responses.create(model=MODEL, input="A", instructions="first")
    assert await client.responses.retrieve(first.id) == first
    stack.worker.script = answer_with("Two")
    second = await client.responses.create(model=MODEL, input="B", previous_response_id=first.id)
    await client.responses.create(model=MODEL, input="C", previous_response_id=second.id)
    said = [
        part.split("<|im_end|>")[0] for part in prompt_of(stack.worker.requests[-1]).split("\n")
    ]
    assert [text for text in said if text and not text.startswith("<|im_start|>")] == [
        "A", "One", "B", "Two", "C",
    ]  # fmt: skip
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as lost:
        await client.responses.create(model=MODEL, input="D", previous_response_id=second.id)
    assert lost.value.param == "previous_response_id"


async def test_a_response_that_is_not_to_be_stored_is_not(stack: Stack) -> None:
    response = (await respond(stack, store=False)).json()
    assert response["store"] is False
    assert (await stack.http.get(f"/v1/responses/{response['id']}")).status_code == 404
    async with Stack(config=FrontendConfig(port=0, max_stored_responses=0)) as other:
        response = (await respond(other)).json()
        assert response["store"] is False
        assert (await other.http.delete(f"/v1/responses/{response['id']}")).status_code == 404


async def test_reasoning_comes_back_without_a_store(stack: Stack) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "aG0="},
        {"type": "message", "role": "assistant", "content": "One", "status": "completed"},
        {"role": "user", "content": "B"},
    ]
    assert (await respond(stack, input=items)).status_code == 200
    items[1]["encrypted_content"] = "gAAAAAB-of_another_server"
    response = await respond(stack, input=items)
    assert response.headers["x-tandem-ignored"] == "input[1].encrypted_content"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),  # nor instructions
    ({"input": 7}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "massage", "role": "user", "content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
     "input[0].arguments"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
    ({"tools": [{"type": "function", "name": "f"}] * 257}, "tools"),
    ({"tools": [{"type": "function", "name": "f"}],
      "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True}, "background"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"top_k": -9}, "top_k"),
    ({"stream_options": {}}, "stream_options"),
    ({"user": "x" * 70_000}, "user"),
]  # fmt: skip


async def test_a_wrong_field_is_named(stack: Stack) -> None:
    for fields, param in WRONG:
        response = await respond(stack, **fields)
        assert response.status_code in (400, 404), (fields, response.text)
        error, is_unknown = response.json()["error"], response.status_code == 404
        assert (error["param"] or "").startswith(param)
        assert f"`{param}" in error["message"] or "context is" in error["message"] or is_unknown
    assert not stack.worker.requests


async def test_an_input_may_be_empty_beside_other_text(stack: Stack) -> None:
    """A client warms up so, or asks for more of a stored response."""
    first = (await respond(stack, input=[], instructions="Be brief.")).json()
    assert first["status"] == "completed"
    more = await respond(stack, input=[], previous_response_id=first["id"])
    assert more.json()["status"] == "completed"
    again = await respond(stack, input="Hi", previous_response_id=more.json()["id"])
    assert again.json()["status"] == "completed"


@pytest.mark.parametrize("are_past", [False, True])
def test_the_parts_of_contents_are_counted_and_not_their_characters(are_past: bool) -> None:
    def num_items(*contents: object) -> int:
        items = [
            {"role": "user", "content": contents[0]},
            *({"type": "function_call_output", "call_id": "1", "output": c} for c in contents[1:]),
        ]
        reading = Reading(Ignored(), sees=False)
        return len(reading.items(json.dumps(items).encode(), "input", are_past=are_past))

    text, half = "x" * 2 * MAX_CONTENT_PARTS, MAX_CONTENT_PARTS // 2
    parts = [{"type": "input_text", "text": "x"}] * half
    assert num_items(text, text) == 2
    assert num_items(parts, text, parts) == 3
    with pytest.raises(InvalidRequestError, match=f"has {2 * half + 1} content parts"):
        num_items(parts, [*parts, parts[0]])
