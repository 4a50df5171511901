"""Tools, reasoning and structured output over HTTP, and by the official client."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tandem.frontend.config import FrontendConfig
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar
from tests.frontend.frontend_stack import (
    MODEL,
    Stack,
    answer_with,
    events_of,
    prompt_of,
    sending,
)
from tests.frontend.grammar_worker import TEMPLATE, GrammarWorker, grammar_of, join

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
ARGUMENTS = '{"city": "東京"}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WORKER = GrammarWorker


def refusal(response: httpx.Response) -> dict[str, str]:
    assert response.status_code == 400, response.text
    error: dict[str, str] = response.json()["error"]
    return error


async def test_a_call_is_answered_whole(stack: Stack) -> None:
    stack.worker.script = answer_with(f"I look.{CALL}")
    (choice,) = (await stack.chat(tools=[WEATHER])).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look." and message["role"] == "assistant"
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert json.dumps(WEATHER) in prompt_of(stack.worker.requests[-1])
    assert grammar_of(stack) is None


async def test_calls_are_streamed_by_the_rules_of_openai(stack: Stack) -> None:
    stack.worker.script = answer_with(f"{CALL}\n{CALL}")
    events = events_of(await stack.chat(tools=[WEATHER], stream=True))
    deltas: list[Any] = [event["choices"][0]["delta"] for event in events]  # type: ignore[index]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    for index in (0, 1):
        first, *others = [part for part in parts if part["index"] == index]
        assert first["id"] and first["type"] == "function"
        assert first["function"] == {"name": "weather", "arguments": ""}
        assert len(others) > 1 and all(other.keys() == {"index", "function"} for other in others)
        assert "".join(other["function"]["arguments"] for other in others) == ARGUMENTS
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"  # type: ignore[index]
    assert not any(delta.get("content") for delta in deltas)


async def test_a_call_that_is_none_is_content(stack: Stack) -> None:
    text = "<tool_call>weather(Paris)</tool_call>"
    stack.worker.script = answer_with(text)
    for fields in ({"tools": [WEATHER]}, {}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = (await stack.chat(**fields)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"
    assert "<tool_call>" not in prompt_of(stack.worker.requests[-1])


async def test_only_one_call_is_made_where_several_are_not_allowed(stack: Stack) -> None:
    stack.worker.script = answer_with(CALL + CALL)
    response = await stack.chat(tools=[WEATHER], parallel_tool_calls=False)
    message = response.json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] == CALL


async def test_reasoning_that_the_prompt_opens_is_told_from_the_answer(stack: Stack) -> None:
    stack.worker.script = answer_with("Hm.\n</think>\n\nHi")
    message = (await stack.chat(reasoning_effort="low")).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi")
    assert prompt_of(stack.worker.requests[-1]).endswith("<think>\n")
    message = (await stack.chat(reasoning_effort="none")).json()["choices"][0]["message"]
    assert message["content"] == "Hm.\n</think>\n\nHi"
    events = events_of(await stack.chat(reasoning_effort="high", stream=True))
    deltas: list[Any] = [event["choices"][0]["delta"] for event in events]  # type: ignore[index]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi"


async def test_an_answer_without_tools_or_thoughts_has_no_grammar(stack: Stack) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [WEATHER]}):
        assert (await stack.chat(**fields)).status_code == 200
        assert grammar_of(stack) is None


CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "json_schema",
        json.dumps(SCHEMA),
    ),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
    ({"guided_regex": "a|b"}, "regex", "a|b"),
    ({"guided_choice": ['a"', "é"]}, "lark", 'start: "a\\"" | "é"'),
    ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
    ({"structured_outputs": {"choice": ["a"]}}, "lark", 'start: "a"'),
    ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
        "structural_tag",
        '{"type": "structural_tag", "structures": [], "triggers": []}',
    ),
]


async def test_each_constraint_reaches_the_worker_as_a_grammar(stack: Stack) -> None:
    for fields, kind, source in CONSTRAINTS:
        assert (await stack.complete(**fields)).status_code == 200, fields
        assert grammar_of(stack) == Grammar(kind, source)  # type: ignore[arg-type]
        assert (await stack.chat(**fields)).status_code == 200
        found = grammar_of(stack)
        assert found is not None
        if found.kind != kind or found.source != source:  # this model may reason before
            assert source.removeprefix("start: ") in found.source and "</think>" in found.source


async def test_required_and_named_calls_and_strict_tools_follow_a_grammar(stack: Stack) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for fields, expected, absent in (
        ({"tools": [WEATHER, NOW], "tool_choice": "required"}, ["weather", "now"], "mixed"),
        ({"tools": [WEATHER, NOW], "tool_choice": named}, ["now"], "weather"),
        ({"tools": [STRICT, NOW]}, ["weather", "now", "mixed"], "calls"),
        (
            {"tools": [WEATHER], "response_format": {"type": "json_object"}},
            ["calls", "body"],
            "mixed",
        ),
    ):
        assert (await stack.chat(**fields)).status_code == 200
        found = grammar_of(stack)
        assert found is not None and found.kind == "lark"
        assert all(each in found.source for each in expected) and absent not in found.source


async def test_a_worker_without_grammars_is_a_400_that_names_the_field(stack: Stack) -> None:
    class PlainWorker(GrammarWorker):
        supports_grammar = False

    async with Stack(num_workers=0) as stack:
        await join(stack, PlainWorker)
        for fields, param in (
            ({"guided_regex": "a"}, "guided_regex"),
            ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [NOW, STRICT]}, "tools[1].function.strict"),
        ):
            error = refusal(await stack.chat(**fields))
            assert (
                error["param"] == param and "do not support structured output" in error["message"]
            )
        assert (await stack.chat(tools=[WEATHER])).status_code == 200


async def test_a_grammar_that_the_worker_refuses_is_an_error_of_the_clients_field(
    stack: Stack,
) -> None:
    refusal_of_worker = InvalidRequestError("the regex: no closing bracket", param="grammar")
    stack.worker.script = sending(error=refusal_of_worker)
    for stream in (False, True):
        error = refusal(await stack.complete(guided_regex="(", stream=stream))
        assert error["param"] == "guided_regex" and "no closing bracket" in error["message"]
    large = {"type": "object", "description": "x" * 60_000}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": large}} for n in range(5)
    ]
    for worker in stack.workers:
        worker.requests.clear()
    error = refusal(await stack.chat(tools=tools, tool_choice="required"))
    assert "characters" in error["message"] or error["param"] == "tool_choice"
    assert not stack.worker.requests


async def test_two_constraints_are_a_400_that_names_both(stack: Stack) -> None:
    error = refusal(await stack.chat(guided_regex="a", response_format={"type": "json_object"}))
    assert "`response_format`" in error["message"] and "`guided_regex`" in error["message"]
    error = refusal(await stack.chat(tools=[WEATHER], guided_grammar='start: "a"'))
    assert "`tools`" in error["message"] and "`guided_grammar`" in error["message"]


async def test_the_format_of_a_model_can_be_set() -> None:
    config = FrontendConfig(port=0, tool_formats=f"{MODEL}=llama3_json; other=none")
    async with Stack(config=config, num_workers=0) as stack:
        await join(stack, GrammarWorker)
        stack.worker.script = answer_with('{"name": "now", "parameters": {}}')
        message = (await stack.chat(tools=[NOW])).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    with pytest.raises(pydantic.ValidationError, match="hermes"):
        FrontendConfig(tool_formats="m=hermse")


async def test_tools_of_a_model_whose_calls_are_not_known_are_a_400(stack: Stack) -> None:
    template = TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")
    async with Stack(num_workers=0) as stack:
        await join(stack, GrammarWorker, template)
        error = refusal(await stack.chat(tools=[NOW]))
        assert error["param"] == "tools" and "frontend.tool_formats" in error["message"]


async def test_the_clients_loop_of_tools_comes_to_an_answer(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in 東京?"}]
    stack.worker.script = answer_with(CALL)
    first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    message = first.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "東京"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    stack.worker.script = answer_with("It rains.")
    last = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert last.choices[0].message.content == "It rains."
    shown = prompt_of(stack.worker.requests[-1])
    assert CALL.replace("\n", "") in shown and "<|im_start|>tool\nRain.<|im_end|>" in shown


async def test_the_client_streams_a_call(client: openai.AsyncOpenAI, stack: Stack) -> None:
    stack.worker.script = answer_with(f"<think>Hm.</think>{CALL}")
    async with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "?"}], tools=[STRICT]
    ) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None and calls[0].function.parsed_arguments == {"city": "東京"}
    assert final.choices[0].finish_reason == "tool_calls"


async def test_the_client_parses_an_answer(client: openai.AsyncOpenAI, stack: Stack) -> None:
    class Step(pydantic.BaseModel):
        text: str
        number: int

    stack.worker.script = answer_with('{"text": "Hi", "number": 1}')
    answer = await client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "?"}], response_format=Step
    )
    assert answer.choices[0].message.parsed == Step(text="Hi", number=1)
    found = grammar_of(stack)
    assert found is not None and "number" in found.source
