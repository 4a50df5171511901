"""Functions and their calls, as chats had them before tools."""

import json
from typing import Any

import openai
import pytest

from tests.frontend.frontend_stack import MODEL, Stack, answer_with, events_of, prompt_of
from tests.frontend.grammar_worker import GrammarWorker, grammar_of, join
from tests.frontend.test_tools import ARGUMENTS, CALL, WEATHER, refusal

FUNCTION = WEATHER["function"]
USER = {"role": "user", "content": "Hi"}
ASKED = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "weather", "arguments": ARGUMENTS},
}
RESULT = {"role": "function", "name": "weather", "content": "18 degrees"}


WORKER = GrammarWorker


async def test_a_call_is_answered_as_that_of_a_function(stack: Stack) -> None:
    stack.worker.script = answer_with(f"I look.{CALL}")
    (choice,) = (await stack.chat(functions=[FUNCTION])).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "function_call": {"name": "weather", "arguments": ARGUMENTS},
    }
    assert json.dumps(WEATHER) in prompt_of(stack.worker.requests[-1])
    assert grammar_of(stack) is None


async def test_a_call_is_streamed_as_that_of_a_function(stack: Stack) -> None:
    stack.worker.script = answer_with(CALL)
    events = events_of(await stack.chat(functions=[FUNCTION], stream=True))
    deltas: list[Any] = [event["choices"][0]["delta"] for event in events]  # type: ignore[index]
    first, *others = [each["function_call"] for each in deltas if "function_call" in each]
    assert first == {"name": "weather", "arguments": ""}
    assert len(others) > 1 and "".join(each["arguments"] for each in others) == ARGUMENTS
    assert not any("tool_calls" in each for each in deltas)
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"  # type: ignore[index]


async def test_an_answer_calls_one_function(stack: Stack) -> None:
    stack.worker.script = answer_with(CALL + CALL)
    message = (await stack.chat(functions=[FUNCTION])).json()["choices"][0]["message"]
    assert message["function_call"]["arguments"] == ARGUMENTS and message["content"] == CALL


async def test_a_choice_among_functions_is_kept(stack: Stack) -> None:
    stack.worker.script = answer_with(CALL)
    other = FUNCTION | {"name": "other"}
    await stack.chat(functions=[FUNCTION, other], function_call={"name": "weather"})
    grammar = grammar_of(stack)
    assert grammar is not None and '"weather' in grammar.source.replace("\\", "")
    assert "other" not in grammar.source
    response = await stack.chat(functions=[FUNCTION], function_call="none")
    assert response.json()["choices"][0]["message"]["content"] == CALL
    assert "city" not in prompt_of(stack.worker.requests[-1])


async def test_a_template_gets_the_history_as_calls_of_tools(stack: Stack) -> None:
    response = await stack.chat(messages=[USER, ASKED, RESULT])
    assert response.status_code == 200, response.text
    prompt = prompt_of(stack.worker.requests[-1])
    call = {"name": "weather", "arguments": json.loads(ARGUMENTS)}
    assert f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" in prompt
    assert "<|im_start|>tool\n18 degrees<|im_end|>" in prompt


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"functions": [FUNCTION], "tools": [WEATHER]}, "tools"),
    ({"functions": [FUNCTION], "tool_choice": "auto"}, "tool_choice"),
    ({"functions": [FUNCTION, FUNCTION]}, "functions[1].name"),
    ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}] * 257}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"functions": [], "function_call": {"name": "f"}}, "function_call"),
    ({"functions": [FUNCTION], "function_call": {"name": "f"}}, "function_call.name"),
    ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
    ({"messages": [USER | {"function_call": {"name": "f"}}]}, "messages[0].function_call"),
    (
        {"messages": [USER, ASKED | {"tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[1].function_call",
    ),
    ({"messages": [USER, ASKED, RESULT | {"tool_call_id": "c"}]}, "messages[2].tool_call_id"),
]


async def test_an_error_names_the_field_of_the_client(stack: Stack) -> None:
    for fields, param in WRONG:
        assert refusal(await stack.chat(**fields))["param"] == param, fields


async def test_a_worker_without_grammars_refuses_a_named_function(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarWorker, "supports_grammar", False)
    async with Stack(num_workers=0) as plain:
        await join(plain, GrammarWorker)
        error = refusal(await plain.chat(functions=[FUNCTION], function_call={"name": "weather"}))
    assert error["param"] == "function_call"


async def test_the_official_client_reads_and_sends_back_a_call(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    stack.worker.script = answer_with(CALL)
    messages: list[Any] = [USER]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, functions=[FUNCTION], function_call="auto"
    )
    message = answer.choices[0].message
    assert message.function_call is not None and message.tool_calls is None
    assert message.function_call.name == "weather"
    stack.worker.script = answer_with("It is warm.")
    answer = await client.chat.completions.create(
        model=MODEL, messages=[*messages, message, RESULT], functions=[FUNCTION]
    )
    assert answer.choices[0].message.content == "It is warm."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("field", ["function_call", "tool_calls"])
async def test_arguments_with_too_many_values_are_named_as_they_were_sent(
    stack: Stack, field: str
) -> None:
    call = {"name": "weather", "arguments": "[" + "1," * 2**18 + "1]"}
    tool_calls = [{"id": "c", "type": "function", "function": call}]
    given = {"function_call": call, "tool_calls": tool_calls}[field]
    answer = await stack.chat(messages=[USER, {"role": "assistant", field: given}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[1].{field}"
