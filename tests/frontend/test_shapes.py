"""One conversation in the shapes of three APIs: the model is given the same prompt."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tandem.runtime.errors import InvalidRequestError
from tests.frontend.frontend_stack import (
    MODEL,
    Stack,
    answer_with,
    prompt_of,
    prompt_tokens,
    sending,
)
from tests.frontend.grammar_worker import GrammarWorker, join

TEMPLATE = (
    "{{ (tools or []) | tojson }};{{ enable_thinking }};{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
    "{{ (m.tool_calls or []) | map(attribute='function') | list | tojson }}|"
    "{{ m.tool_call_id }};{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Oslo, then.",
         "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "reasoning_effort": "none",
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Oslo, then."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", **CALL},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "reasoning": {"effort": "none"},
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "max_tokens": 20,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Oslo, then.", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1",
             "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ],
    "tools": [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}],
    "thinking": {"type": "disabled"},
}  # fmt: skip
SHAPES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(num_workers=0) as running:
        await join(running, GrammarWorker, TEMPLATE)
        yield running


async def ask(stack: Stack, path: str, **fields: object) -> httpx.Response:
    return await stack.http.post(path, json={"model": MODEL} | SHAPES[path] | fields)


async def test_one_conversation_has_one_prompt_in_every_shape(stack: Stack) -> None:
    for path in SHAPES:
        response = await ask(stack, path)
        assert response.status_code == 200, response.text
    prompts = [prompt_of(request) for request in stack.worker.requests]
    assert prompts[0] == prompts[1] == prompts[2]
    assert "Oslo, then." in prompts[0] and '"city": "Oslo"' in prompts[0]
    fields = {name: value for name, value in MESSAGES.items() if name != "max_tokens"}
    counted = await stack.http.post("/v1/messages/count_tokens", json={"model": MODEL} | fields)
    assert counted.json()["input_tokens"] == len(prompt_tokens(stack.worker.requests[-1]))


async def test_a_call_of_the_model_is_one_in_every_shape(stack: Stack) -> None:
    stack.worker.script = answer_with(
        'I see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    message = (await ask(stack, "/v1/chat/completions")).json()["choices"][0]["message"]
    response = (await ask(stack, "/v1/responses")).json()["output"]
    content = (await ask(stack, "/v1/messages", max_tokens=200)).json()
    assert message["content"] == response[0]["content"][0]["text"] == content["content"][0]["text"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert response[1]["arguments"] == call["function"]["arguments"]
    assert content["content"][1]["input"] == {"city": "Rome"}
    names = [call["function"]["name"], response[1]["name"], content["content"][1]["name"]]
    assert names == ["weather"] * 3 and content["stop_reason"] == "tool_use"


async def test_the_same_grammar_is_sent_in_every_shape(stack: Stack) -> None:
    required: dict[str, Any] = {
        "/v1/chat/completions": {"tool_choice": "required"},
        "/v1/responses": {"tool_choice": "required"},
        "/v1/messages": {"tool_choice": {"type": "any"}},
    }
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    inner = {"name": "answer", "schema": SCHEMA}
    schemas: dict[str, Any] = {
        "/v1/chat/completions": {
            "response_format": {"type": "json_schema", "json_schema": inner}, "tools": None
        },
        "/v1/responses": {"text": {"format": form}, "tools": None},
        "/v1/messages": {
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "tools": None
        },
    }  # fmt: skip
    for given in (required, schemas):
        for path, fields in given.items():
            response = await ask(stack, path, **fields)
            assert response.status_code == 200, response.text
    grammars = [request.grammar for request in stack.worker.requests]
    assert None not in grammars
    assert grammars[0] == grammars[1] == grammars[2] != grammars[3] == grammars[4] == grammars[5]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {"tool_choice": "required"}, "tool"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
         "text.format"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
         "output_config.format"),
    ],
)  # fmt: skip
async def test_a_grammar_that_the_worker_refuses_is_named_in_the_shape_of_the_client(
    stack: Stack, path: str, fields: dict[str, Any], name: str
) -> None:
    refusal = InvalidRequestError("`grammar` cannot be compiled", param="grammar")
    stack.worker.script = sending(error=refusal)
    tools = {} if "tool_choice" in fields else {"tools": None}
    response = await ask(stack, path, **fields, **tools)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"`{name}" in message and "response_format" not in message, message
