"""Null is the same as a field that is left out, at every level of every API's body."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tandem.frontend.anthropic.requests import LARGE, MessagesRequest
from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.typed import read_body
from tandem.frontend.chat.requests import ChatRequest, parse
from tandem.frontend.config import FrontendConfig
from tandem.frontend.responses.api import chat_of
from tandem.frontend.responses.items import Reading
from tandem.frontend.responses.requests import parse as parse_response
from tandem.frontend.responses.tools import read_all
from tandem.runtime.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", None], "default": None}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
ANY_JSON = ("parameters", "input_schema", "schema", "input", "chat_template_kwargs", "metadata")
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "index": 0,
                    "function": {"name": "f", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "18"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": None},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
    },
}
RESPONSE = {
    "model": "m",
    "instructions": "x",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": None},
        {"type": "function_call_output", "call_id": "c", "output": "18", "id": "x"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
}
MESSAGE = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "citations": []}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": None}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "18", "is_error": False}
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


def of_chat(raw: bytes) -> object:
    return read_chat(parse(ChatRequest, raw, FrontendConfig()))


def read_chat(body: ChatRequest) -> object:
    body.check(FrontendConfig(), Ignored())
    return body, body.conversation(), body.constraint()


def of_response(raw: bytes) -> object:
    ignored = Ignored()
    request = parse_response(raw, ignored)
    tools = read_all(request.tools, request.tool_choice, ignored)
    return read_chat(
        chat_of(request, [], request.inputs(Reading(ignored, sees=False)), tools, None)
    )


def of_message(raw: bytes) -> object:
    request = read_body(MessagesRequest, raw, LARGE, Ignored())
    return read_chat(request.chat(Ignored(), None, images_as_text=True))


def changes(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every field of every object: its name, the value with a null there, and without the field."""
    if isinstance(value, dict):
        for name in [*value, "unknown"]:
            rest = {key: each for key, each in value.items() if key != name}
            yield name, value | {name: None}, rest
            if name in value and (name not in ANY_JSON or not isinstance(value[name], dict)):
                for path, null, without in changes(value[name]):
                    yield f"{name}.{path}", value | {name: null}, value | {name: without}
    elif isinstance(value, list):
        for place, each in enumerate(value):
            for path, null, without in changes(each):
                before, after = value[:place], value[place + 1 :]
                yield f"{place}.{path}", [*before, null, *after], [*before, without, *after]


def outcome(read: Callable[[bytes], object], body: Any) -> object:
    try:
        return msgspec.json.decode(msgspec.json.encode(read(json.dumps(body).encode())))
    except InvalidRequestError:
        return "refused"


@pytest.mark.parametrize(
    ("read", "body"), [(of_chat, CHAT), (of_response, RESPONSE), (of_message, MESSAGE)]
)
def test_null_is_a_field_that_is_left_out(read: Callable[[bytes], object], body: Any) -> None:
    assert not isinstance(outcome(read, body), str)
    paths = []
    for path, null, without in changes(body):
        expected = outcome(read, without)
        if expected != "refused":  # a field that has to be there
            assert outcome(read, null) == expected, path
            paths.append(path)
    assert len(paths) > 20
