"""Errors found in the chat that a body stands for name the field in the body of the client."""

import json
from typing import Any

from tandem.runtime.errors import InvalidRequestError
from tests.frontend.frontend_stack import MODEL, Stack
from tests.frontend.grammar_worker import GrammarWorker
from tests.frontend.text.text_stack import TEXT_MODEL, add_text_worker, says

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "Hi"}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HELLO]},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [HELLO], "max_tokens": 9},
}
MANY = [0] * 2**17
FUNCTION = {"name": "f", "arguments": json.dumps({"a": MANY})}
ANSWER = {"role": "assistant", "tool_calls": [{"id": "c", "function": FUNCTION}]}
CALL = {"type": "function_call", "call_id": "c", **FUNCTION}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": MANY}}
RESULTS = [{"type": "tool_result", "tool_use_id": "c", "content": "x"}] * 2
TURN = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": RESULTS}]


def functions(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name} for name in names]


def namespace(*names: str) -> dict[str, Any]:
    return {"type": "namespace", "name": "ns", "tools": functions(*names)}


def in_chat(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def in_messages(*names: str) -> list[dict[str, Any]]:
    return [{"type": "web_search", "name": "w"}] + [
        {"name": name, "input_schema": {}} for name in names
    ]


def allowed(name: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "required", "tools": functions(name)}


CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": in_chat("a", "bad name!")}, "tools[1].function.name"),
    (CHAT, {"tools": in_chat("a", "a")}, "tools[1].function.name"),
    (CHAT, {"messages": [HELLO, ANSWER, ANSWER]}, "messages[2].tool_calls"),
    (RESPONSES, {"tools": [namespace("a", "b"), *functions("c", "c")]}, "tools[2].name"),
    (RESPONSES, {"tools": [namespace("a", "b"), *functions("bad name!")]}, "tools[1].name"),
    (RESPONSES, {"tools": [namespace("a", "bad name!")]}, "tools[0].tools[1].name"),
    (RESPONSES, {"tools": [namespace(*map(str, range(200)))] * 2}, "tools"),
    (RESPONSES, {"tools": functions("a"), "tool_choice": functions("b")[0]}, "tool_choice.name"),
    (RESPONSES, {"tools": functions("a"), "tool_choice": allowed("b")}, "tool_choice.tools"),
    (RESPONSES, {"input": [HELLO, CALL, HELLO, HELLO, CALL]}, "input[4]"),
    (RESPONSES, {"input": [HELLO, CALL, CALL]}, "input[2]"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": "x " * 200_000}, "input"),
    (MESSAGES, {"tools": in_messages("a", "bad name!")}, "tools[2].name"),
    (MESSAGES, {"tools": in_messages("a"), "tool_choice": {"type": "tool", "name": "b"}},
     "tool_choice.name"),
    (MESSAGES, {"messages": [HELLO, *TURN, *TURN], "system": "Be brief."}, "messages[3]"),
    (MESSAGES, {"stop_sequences": ["a"] * 99}, "stop_sequences"),
]  # fmt: skip


WORKER = GrammarWorker


async def test_an_error_names_the_field_by_its_path_in_the_clients_body(stack: Stack) -> None:
    for path, fields, name in CASES:
        body = {"model": MODEL} | BASES[path] | fields
        response = await stack.http.post(path, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        is_long = "the model's context" in error["message"]  # a sentence that names no field
        assert f"`{name}`" in error["message"] or is_long, error
        assert error.get("param", name) == name
    assert not stack.worker.requests


NAMES = [
    ("tools[2].function.parameters", "tools[1].parameters"),
    ("messages[1].tool_calls", "input[1]"),
    ("max_completion_tokens", "max_output_tokens"),
    ("stop_token_ids", "stop_token_ids"),
]


async def test_a_field_that_a_worker_names_has_the_clients_name() -> None:
    async with Stack(num_workers=0) as stack:
        worker = await add_text_worker(stack, says())
        for param, name in NAMES:
            worker.text_script = says(error=InvalidRequestError(f"`{param}` is wrong", param=param))
            body = {
                "model": TEXT_MODEL,
                "input": [HELLO, HELLO],
                "tools": [namespace("a", "b"), *functions("c")],
            }
            error = (await stack.http.post(RESPONSES, json=body)).json()["error"]
            assert (error["param"], error["message"]) == (name, f"`{name}` is wrong")
