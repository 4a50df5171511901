"""Answers that end anywhere: by max_tokens, by a stop string, by an end token in a call. They come
back as the history of the next turn.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tandem.frontend.parsers.output_format import output_format
from tandem.frontend.parsers.streaming import StreamingParser
from tandem.runtime.wire.messages import TokenDelta
from tests.frontend.frontend_stack import (
    MODEL,
    Stack,
    answer_with,
    events_of,
    prompt_of,
    sending,
    token_ids,
)
from tests.frontend.grammar_worker import GrammarWorker, join
from tests.frontend.parsers.cases import CASES
from tests.frontend.parsers.shared_cases import SCHEMAS, SHARED_CASES
from tests.frontend.parsers.test_streaming import joined
from tests.frontend.tokens.template_shapes import SHAPES
from tests.frontend.tokens.test_template_shapes import oracle, rendered, text_of

TEMPLATE = SHAPES["thoughts cut out of old turns"] + "{# tools #}"
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": ["é", 1]}}\n</tool_call>'
SHORT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXT = f"<think>Hm.</think>\nI look.{SHORT}\n{CALL}"
NUM_TOKENS = len(token_ids(TEXT))
OF_ANY_FORMAT = CASES | {
    name: case for name, case in SHARED_CASES.items() if name.endswith(": two calls")
}
Answer = dict[str, Any]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(num_workers=0) as stack:
        await join(stack, GrammarWorker, TEMPLATE)
        stack.worker.script = answer_with(TEXT)
        yield stack


async def answered(stack: Stack, path: str, **body: object) -> Answer:
    response = await stack.http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, (body, response.text)
    answer: Answer = response.json()
    return answer


async def chat(stack: Stack, num_tokens: int) -> Answer:
    """Cut a chat after so many tokens and send its answer back. Returns the second body."""
    fields: Answer = {"tools": [TOOL]}
    path = "/v1/chat/completions"
    first = await answered(stack, path, messages=[USER], max_tokens=num_tokens, **fields)
    message = first["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "18"}
        for call in message.get("tool_calls", [])
    ]
    body = fields | {"messages": [USER, message, *(results or [USER])]}
    await answered(stack, path, max_tokens=1, **body)
    return body


async def messages(stack: Stack, num_tokens: int) -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    path, fields = "/v1/messages", {"tools": tools}
    first = await answered(stack, path, messages=[USER], max_tokens=num_tokens, **fields)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "18"}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    turns = [USER, {"role": "assistant", "content": first["content"]}]
    last = {"role": "user", "content": results} if results else USER
    await answered(stack, path, messages=[*turns, last], max_tokens=1, **fields)


async def responses(stack: Stack, num_tokens: int) -> None:
    """Send the items back, and then name the stored response instead."""
    fields = {"tools": [{"type": "function", **FUNCTION}]}
    first = await answered(
        stack, "/v1/responses", input=[USER], max_output_tokens=num_tokens, **fields
    )
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "18"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    more = results or [USER]
    whole = [USER, *first["output"], *more]
    await answered(stack, "/v1/responses", input=whole, max_output_tokens=1, **fields)
    prompt = prompt_of(stack.worker.requests[-1])
    await answered(
        stack,
        "/v1/responses",
        input=more,
        previous_response_id=first["id"],
        max_output_tokens=1,
        **fields,
    )
    assert prompt_of(stack.worker.requests[-1]) == prompt


async def test_an_answer_cut_anywhere_is_history_of_the_next_turn(stack: Stack) -> None:
    """The prompt is that of transformers, and the same by all APIs."""
    for num_tokens in range(NUM_TOKENS, 0, -5):
        body = await chat(stack, num_tokens)
        expected = oracle(TEMPLATE, with_objects(body))
        assert prompt_of(stack.worker.requests[-1]) == expected, body
        for api in (messages, responses):
            await api(stack, num_tokens)
            assert prompt_of(stack.worker.requests[-1]) == expected, (api, body)


def with_objects(body: Answer) -> Answer:
    """A body whose arguments are objects, those that are none under one key."""
    body = json.loads(json.dumps(body))
    for message in body["messages"]:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = as_object(call["function"]["arguments"])
    return body


def as_object(arguments: str) -> str:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return arguments or "{}" if isinstance(value, dict) else json.dumps({"arguments": arguments})


@pytest.mark.parametrize("name", OF_ANY_FORMAT)
def test_an_answer_of_any_format_cut_anywhere_is_rendered(name: str) -> None:
    case = OF_ANY_FORMAT[name]
    text = text_of(TEMPLATE)
    for end in range(0, len(case.text), 3):
        parser = StreamingParser(
            output_format(case.reasoning, case.tools),
            starts_reasoning=case.starts_reasoning,
            schemas=SCHEMAS,
        )
        pieces = parser.push(case.text[:end]) if end else []
        content, reasoning, calls = joined(pieces + parser.finish(is_cut=True))
        message = {
            "role": "assistant",
            "content": content or None,
            "reasoning_content": reasoning,
            "tool_calls": [
                {"id": "c", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ],
        }
        assert rendered(text, {"messages": [USER, message, USER]}) is not None


async def test_the_beginning_of_a_call_is_no_content_of_an_answer_that_is_cut(
    stack: Stack,
) -> None:
    for choice, text in (("auto", f"I look.{CALL}"), ("required", CALL)):
        stack.worker.script = answer_with(text)
        for num_tokens in range(1, len(token_ids(text)), 2):
            response = await stack.chat(tools=[TOOL], tool_choice=choice, max_tokens=num_tokens)
            (answer,) = response.json()["choices"]
            content = answer["message"]["content"]
            assert answer["finish_reason"] == "length"
            assert '"name"' not in (content or "") and (choice == "auto" or not content)


async def test_stop_strings_end_content_and_neither_reasoning_nor_calls(stack: Stack) -> None:
    stop = ["look", "f", "arg", "Hm", "\n"]
    text = f"<think>\nHm, I look.\n</think>\n\n{CALL}"
    stack.worker.script = answer_with(text)
    for stream in (False, True):
        response = await stack.chat(tools=[TOOL], stop=stop, stream=stream)
        message, reason = whole(response)
        assert (message["reasoning_content"], message["content"]) == ("Hm, I look.", "")
        assert json.loads(message["arguments"]) == {"a": ["é", 1]} and reason == "tool_calls"
    stack.worker.script = answer_with(f"<think>look</think>I look.{CALL}")
    for stream in (False, True):
        message, reason = whole(await stack.chat(tools=[TOOL], stop=stop, stream=stream))
        assert message == {"reasoning_content": "look", "content": "I ", "arguments": ""}
        assert reason == "stop"


def whole(response: httpx.Response) -> tuple[dict[str, str], str]:
    """The texts of an answer, streamed or not, and its finish reason."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    bodies: list[Any] = events_of(response) if is_stream else [response.json()]
    texts = dict.fromkeys(("reasoning_content", "content", "arguments"), "")
    for body in bodies:
        part = body["choices"][0].get("delta") or body["choices"][0].get("message") or {}
        for name in ("reasoning_content", "content"):
            texts[name] += part.get(name) or ""
        for call in part.get("tool_calls", []):
            texts["arguments"] += call["function"]["arguments"]
    return texts, bodies[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("path", "body", "reason_of"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER], "tools": [TOOL]},
            lambda answer: answer["choices"][0]["finish_reason"] == "stop",
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "max_tokens": 64,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
            lambda answer: answer["stop_reason"] == "end_turn",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
            lambda answer: answer["output"][-1]["status"] == "incomplete",
        ),
    ],
)
async def test_an_end_token_within_a_call_is_not_the_end_of_a_call(
    stack: Stack, path: str, body: Answer, reason_of: Callable[[Answer], bool]
) -> None:
    """A client runs the calls of an answer that ends with calls."""
    deltas = [TokenDelta(token_ids(CALL[:50])), TokenDelta([], "stop", stop_token_id=0)]
    stack.worker.script = sending(*deltas)
    assert reason_of(await answered(stack, path, **body))
