"""Anthropic's Messages API over HTTP, with the official client where it matters."""

import json
from typing import Any

import anthropic
import httpx
import pytest

from tandem.frontend.generation.answer_format import AnswerFormat
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

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def message(stack: Stack, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 64, "messages": MESSAGES} | fields
    return await stack.http.post("/v1/messages", json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_the_client_reads_a_whole_message(
    claude: anthropic.AsyncAnthropic, stack: Stack
) -> None:
    answer = await claude.messages.create(
        model=MODEL,
        max_tokens=64,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=MESSAGES,
    )
    (block,) = answer.content
    assert block.type == "text" and block.text == ANSWER
    assert answer.stop_reason == "end_turn" and answer.stop_sequence is None
    num_prompt = len(prompt_tokens(stack.worker.requests[0]))
    assert answer.usage.input_tokens == num_prompt - 2
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.output_tokens == len(token_ids(ANSWER)) + 1
    assert prompt_of(stack.worker.requests[0]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


async def test_the_client_reads_a_stream(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == ANSWER and len(texts) > 3
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 3


async def test_a_stream_has_anthropics_events_in_their_order(stack: Stack) -> None:
    events = events_of(await message(stack, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message_start", "ping", "content_block_start",
        *["content_block_delta"] * kinds.count("content_block_delta"),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(token_ids(ANSWER)) + 1


async def test_thinking_text_and_calls_are_blocks_of_their_own(
    claude: anthropic.AsyncAnthropic, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerFormat, "new_parser", lambda *_: LetterParser())
    stack.worker.script = answer_with('~hm, ~hello f:{"a": 1}')
    monkeypatch.setattr(LetterParser, "finish", lambda _, is_cut: [])
    whole = (await message(stack)).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "hm, " and whole["content"][1]["text"] == "hello "
    call = {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}}
    assert whole["content"][2] == call and whole["stop_reason"] == "tool_use"
    async with claude.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].model_dump(exclude_none=True) == call
    assert final.stop_reason == "tool_use"


async def test_arguments_that_are_no_object_are_not_lost(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerFormat, "new_parser", lambda *_: LetterParser())
    stack.worker.script = answer_with("f:[1")
    assert (await message(stack)).json()["content"][0]["input"] == {"arguments": "[1."}


async def test_text_of_the_assistant_at_the_end_is_the_beginning_of_the_answer(
    stack: Stack,
) -> None:
    begun = "Once upon a\n\n"
    blocks = [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon a\n\n"}]
    for content in (begun, blocks):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        assert (await message(stack, messages=messages)).json()["content"][0]["text"] == ANSWER
        prompt = prompt_tokens(stack.worker.requests[-1])
        assert prompt_of(stack.worker.requests[-1]).endswith(f"<|im_start|>assistant\n{begun}")
        body = {"model": MODEL, "messages": messages}
        counted = await stack.http.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": len(prompt)}


async def test_a_last_message_that_only_calls_or_is_empty_is_no_beginning(stack: Stack) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    for content in ([call], [{"type": "text", "text": "x"}, call], "", []):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        assert (await message(stack, messages=messages)).status_code == 200
        end = prompt_of(stack.worker.requests[-1])
        assert end.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zz", "wör"]}, "stop_sequence", "wör"),
    ],
)
async def test_the_end_of_a_message_has_its_reason(
    stack: Stack, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    whole = (await message(stack, **fields)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    delta = events_of(await message(stack, stream=True, **fields))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


async def test_an_error_in_a_stream_is_an_event_that_the_client_raises(
    claude: anthropic.AsyncAnthropic, stack: Stack
) -> None:
    stack.worker.script = one_token_then_fail
    last = events_of(await message(stack, stream=True))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIError, match="error id"):
        async with claude.messages.stream(model=MODEL, max_tokens=9, messages=MESSAGES) as stream:
            await stream.get_final_message()


async def test_errors_have_anthropics_shape(claude: anthropic.AsyncAnthropic, stack: Stack) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="x", max_tokens=1, messages=MESSAGES)
    long: Any = [{"role": "user", "content": "x " * 200}]
    with pytest.raises(anthropic.BadRequestError, match="context is 128 tokens"):
        await claude.messages.create(model=MODEL, max_tokens=1, messages=long)
    response = await stack.http.get("/v1/messages")
    assert response.status_code == 405 and response.json()["type"] == "error"


async def test_tokens_are_counted_as_a_message_has_them(
    claude: anthropic.AsyncAnthropic, stack: Stack
) -> None:
    counted = await claude.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    assert not stack.worker.requests
    await message(stack, system="Be brief.")
    assert counted.input_tokens == len(prompt_tokens(stack.worker.requests[0]))


def content(*blocks: object, role: str = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (content({"type": "image"}), "messages[0].content[0].type"),
    (content({"type": "text"}), "messages[0].content[0].text"),
    (content({"type": "tool_use", "id": "x", "name": "f", "input": 1}, role="assistant"),
     "messages[0].content[0].input"),
    (content({"type": "tool_use", "id": "x", "name": "f", "input": {}}),
     "messages[0].content[0].type"),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
    ({"tools": [{"name": "f", "input_schema": 1}]}, "tools[0].input_schema"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"temperature": 2.5}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"container": "x"}, "container"),
]  # fmt: skip


async def test_a_wrong_field_is_named(stack: Stack) -> None:
    for fields, name in WRONG:
        response = await message(stack, **fields)
        assert response.status_code == 400, (fields, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and f"`{name}" in error["message"]
    assert not stack.worker.requests
