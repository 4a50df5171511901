"""Attacks through responses, messages, tokens, tools and schemas."""

import asyncio
import json
import random
from collections.abc import Awaitable
from itertools import chain
from typing import Any

from tests.soak.attacks.target import (
    CHAT,
    COMPLETIONS,
    Attack,
    Target,
    chat,
    completion,
    exchange,
    post,
    request,
    with_field,
)

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
MIB = 2**20
NUM_STORED = 40
WRONG: tuple[Any, ...] = ("x", -1, 1e308, [], {}, [[[]]], {"type": "x"}, "\x00\ud800", 2**63)


async def _all(*attempts: Awaitable[list[int]]) -> list[int]:
    return list(chain.from_iterable(await asyncio.gather(*attempts)))


def _body(target: Target, fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": target.model, **fields}).encode()


def _response(target: Target, **fields: Any) -> bytes:
    return _body(target, {"input": "Hi", "max_output_tokens": 2, **fields})


def _message(target: Target, **fields: Any) -> bytes:
    user = {"role": "user", "content": "Hi"}
    return _body(target, {"messages": [user], "max_tokens": 2, **fields})


def _nested(depth: int) -> dict[str, Any]:
    """A schema of objects within objects."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _chained(count: int) -> str:
    """A Lark grammar of a long chain of rules."""
    rules = [f"r{i}: r{i + 1} r{i + 1}?" for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "a"'])


async def hostile_schemas(target: Target) -> list[int]:
    """Grammars that cost much to compile or to follow, with faults, or larger than a field."""
    schemas: list[Any] = [
        {"type": "string", "pattern": "(x+x+)+y"},
        {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
        {"type": "integer", "minimum": 10**300, "multipleOf": 1e-300},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"enum": ["x" * 100] * 500},
        {"type": "string", "format": "x" * 10_000},
        {"properties": {"\u0000": {}, "": {}, "a" * 50_000: {}}},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        _nested(200),
    ]
    others = [
        {"guided_regex": "(" * 10_000},
        {"guided_regex": "[\\u0000-\\U0010ffff]{99999}"},
        {"guided_regex": "(a|aa)*" * 2000},
        {"guided_grammar": _chained(2000)},
        {"guided_grammar": "start: start start"},
        {"guided_grammar": 'root ::= root root | "a"'},
        {"guided_choice": ["x" * 60] * 1024},
    ]
    statuses = []
    for body in [
        *(completion(target, guided_json=schema) for schema in schemas),
        *(completion(target, **fields) for fields in others),
    ]:
        statuses += await post(target, COMPLETIONS, body)
    return statuses


async def grammars_that_cost_more_with_each_token(target: Target) -> list[int]:
    """Ambiguous ones: the parser keeps every way to read the answer so far."""
    grammars = (
        'start: e\ne: e e | "a" | "b" e | ',
        'start: e\ne: e e | "a"',
        'root ::= root root | "a" | ""',
    )
    fields: dict[str, Any] = {"min_tokens": 200, "max_tokens": 200}
    bodies = [completion(target, guided_grammar=each, **fields) for each in grammars * 3]
    return await _all(*(post(target, COMPLETIONS, body) for body in bodies))


async def grammars_that_wait_for_a_trial(target: Target) -> list[int]:
    """New ones, of eight callers at a time, none of which passes."""
    drawn = random.randrange(2**60)
    schemas = [
        {"allOf": [{"pattern": f"^.*x{drawn + caller}{i}.*$"} for i in range(40)]}
        for caller in range(8)
    ]
    bodies = [completion(target, guided_json=schema) for schema in schemas]
    return await _all(*(post(target, COMPLETIONS, body) for body in bodies))


async def many_tokens_from_many_callers(target: Target) -> list[int]:
    body = _body(target, {"tokens": [1] * 2**20})
    return await _all(*(post(target, DETOKENIZE, body) for _ in range(6)))


async def schemas_as_deep_as_a_field_is_long(target: Target) -> list[int]:
    statuses = []
    for size in (60_000, 7 * MIB):
        for unit in (b"[", b'{"not":', b'{"properties":{"a":'):
            value = unit * (size // len(unit))
            for field in ("guided_json", "response_format", "tools", "structured_outputs"):
                statuses += await post(target, CHAT, with_field(chat(target), field, value))
    return statuses


async def hostile_tools(target: Target) -> list[int]:
    function = {"name": "f", "parameters": _nested(50)}
    tool = {"type": "function", "function": function}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{" * 60_000}}
    answer = {"role": "assistant", "tool_calls": [call] * 4096}
    bodies = [
        chat(target, tools=[tool | {"function": function | {"name": str(i)}} for i in range(256)]),
        chat(target, tools=[tool], tool_choice="required"),
        chat(target, tools=[tool] * 257),
        chat(target, messages=[answer | {"tool_calls": [call]}]),
        chat(target, messages=[answer]),
        *(chat(target, tools=[{"type": "function", "function": each}]) for each in WRONG),
        *(chat(target, tools=[tool], tool_choice=each) for each in WRONG),
    ]
    return await _all(*(post(target, CHAT, body) for body in bodies))


async def hostile_responses(target: Target) -> list[int]:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}
    bodies = [
        _response(target, input=[item] * 40_000),
        _response(target, input=[item | {"content": item["content"] * 100_000}]),
        _response(target, input=[call] * 2000),
        _response(target, input="word " * (MIB // 5)),
        _response(target, previous_response_id="x" * MIB),
        _response(target, tools=[{"type": "namespace", "name": "n", "tools": []}] * 300),
        with_field(_response(target), "input", b"[" * MIB),
        *(
            _response(target, **{field: wrong})
            for field in ("input", "tools", "text", "reasoning", "metadata", "include")
            for wrong in WRONG
        ),
    ]
    paths = ("/v1/responses/%00", "/v1/responses/" + "x" * 30_000, "/v1/responses/..")
    methods = ("GET", "DELETE")
    requests = [request(target, path, b"", method=name) for path in paths for name in methods]
    return await _all(
        *(post(target, RESPONSES, body) for body in bodies),
        *(exchange(target, data) for data in requests),
    )


async def stored_responses(target: Target) -> list[int]:
    """More stored bytes than a frontend keeps, most of them in a field that comes back."""
    metadata = {f"k{i}": "x" * 500 for i in range(16)}
    return await _all(
        *(post(target, RESPONSES, _response(target, metadata=metadata)) for _ in range(NUM_STORED))
    )


async def hostile_messages(target: Target) -> list[int]:
    block = {"type": "text", "text": ""}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block] * 2000}
    bodies = [
        _message(target, system=[block] * 100_000),
        _message(target, messages=[{"role": "user", "content": [block] * 100_000}]),
        _message(target, messages=[{"role": "user", "content": [result] * 40}]),
        _message(target, messages=[{"role": "user", "content": ""}] * 100_000),
        _message(target, stop_sequences=["x"] * 100_000),
        with_field(_message(target), "system", b"[" * MIB),
        *(
            _message(target, **{field: wrong})
            for field in ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
            for wrong in WRONG
        ),
    ]
    paths = (MESSAGES, COUNT_TOKENS)
    return await _all(*(post(target, path, body) for path in paths for body in bodies))


async def hostile_tokens(target: Target) -> list[int]:
    statuses = []
    for text in ("a", " ", "\u0301", "😀", "the world, "):
        prompt = text * (7 * MIB // len(text.encode()) // 3)
        statuses += await post(target, TOKENIZE, _body(target, {"prompt": prompt}))
    tokens: list[Any] = [[1] * 2_000_000, [-1], [2**64], [1e308], ["x"], [[1]], {}, "x", [320]]
    messages = [{"role": "user", "content": ""}] * 100_000
    bodies = [(DETOKENIZE, {"tokens": each}) for each in tokens]
    bodies += [(TOKENIZE, {"prompt": each}) for each in WRONG]
    bodies += [(TOKENIZE, {"messages": messages}), (TOKENIZE, {})]
    return statuses + await _all(
        *(post(target, path, _body(target, each)) for path, each in bodies)
    )


API_ATTACKS: tuple[Attack, ...] = (
    hostile_schemas, grammars_that_cost_more_with_each_token, grammars_that_wait_for_a_trial,
    schemas_as_deep_as_a_field_is_long, hostile_tools, hostile_responses, stored_responses,
    hostile_messages, hostile_tokens, many_tokens_from_many_callers,
)  # fmt: skip
