"""The cases of the Open Responses compliance suite, by the types of its specification."""

from typing import Any

import pytest
from pydantic import BaseModel

from tests.frontend.frontend_stack import MODEL, Stack, answer_with
from tests.frontend.grammar_worker import GrammarWorker
from tests.frontend.responses.test_responses import events_of

types = pytest.importorskip(
    "openresponses_types.types", reason="openresponses-types is not installed"
)


def message(role: str, text: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": text}


GET_WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Return the weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City and state."}},
        "required": ["location"],
    },
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'
)
# name |-> (request, the model's text, kinds of the output's items)
CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "basic text": ({"input": [message("user", "Greet me.")]}, "Hello.", ["message"]),
    "a system prompt": (
        {"input": [message("system", "You are a pirate."), message("user", "Greet me.")]},
        "Ahoy.",
        ["message"],
    ),
    "several turns": (
        {
            "input": [
                message("user", "I am Alice."),
                message("assistant", "Hello Alice."),
                message("user", "Who am I?"),
            ]
        },
        "Alice.",
        ["message"],
    ),
    "a tool": (
        {"input": [message("user", "How is the weather?")], "tools": [GET_WEATHER]},
        CALL,
        ["function_call"],
    ),
    "reasoning": (
        {"input": [message("user", "Greet me.")], "reasoning": {"effort": "high"}},
        "I greet.</think>Hello.",
        ["reasoning", "message"],
    ),
    "a limit": (
        {"input": [message("user", "Greet me.")], "max_output_tokens": 3},
        "Hello there. " * 5,
        ["message"],
    ),
}
EVENTS: dict[str, type[BaseModel]] = {
    str(each): model
    for name, model in vars(types).items()
    if name.endswith("StreamingEvent")
    for each in vars(types)[model.__annotations__["type"].split("[")[1].split(",")[0]]
}


WORKER = GrammarWorker


@pytest.mark.parametrize("name", CASES)
async def test_responses_have_the_form_of_the_specification(stack: Stack, name: str) -> None:
    fields, text, kinds = CASES[name]
    stack.worker.script = answer_with(text)
    for is_streamed in (False, True):
        answer = await stack.http.post(
            "/v1/responses", json={"model": MODEL, "stream": is_streamed} | fields
        )
        assert answer.status_code == 200, answer.text
        response = answer.json() if not is_streamed else None
        if is_streamed:
            events = events_of(answer)
            for event in events:
                check_event(event)
            response = events[-1]["response"]
            check_calls(events, "function_call" in kinds)
        types.ResponseResource.model_validate(response)
        status = "incomplete" if "max_output_tokens" in fields else "completed"
        assert response["status"] == status
        assert [item["type"] for item in response["output"]] == kinds


def check_event(event: dict[str, Any]) -> None:
    """Assert the event's form. OpenAI's clients call the text of reasoning `reasoning_text`."""
    name = event["type"].replace("response.reasoning_text.", "response.reasoning.")
    EVENTS[name].model_validate(event | {"type": name})


def check_calls(events: list[dict[str, Any]], has_call: bool) -> None:
    """Assert that a call is streamed from its name over its arguments to its end."""
    found = [
        event["type"]
        for event in events
        if "arguments" in event["type"] or event.get("item", {}).get("type") == "function_call"
    ]
    expected = ["response.output_item.added", "response.function_call_arguments.delta"]
    expected += ["response.function_call_arguments.done", "response.output_item.done"]
    assert list(dict.fromkeys(found)) == (expected if has_call else [])
