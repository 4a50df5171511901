"""Whole conversations of clients that run tools: the official ones, and an agent framework."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.frontend.frontend_stack import MODEL, Script, Stack, answer_with, prompt_of
from tests.frontend.grammar_worker import GrammarWorker, grammar_of, join
from tests.frontend.test_tools import CALL

QUESTION = "Weather in 東京?"
WEATHER = "It rains, 18 degrees."
ANSWER = "Take an umbrella."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(num_workers=0) as stack:
        await join(stack, GrammarWorker)
        stack.worker.script = in_turn(f"I look.{CALL}", ANSWER)
        yield stack


def in_turn(*texts: str) -> Script:
    """Answer one request after the other with these texts."""
    scripts = iter([answer_with(text) for text in texts])

    async def script(*request: Any) -> None:
        await next(scripts)(*request)

    return script


def assert_shown(stack: Stack) -> None:
    """Assert that the model was shown the question, its call and the tool's result."""
    prompt = prompt_of(stack.worker.requests[-1])
    places = [prompt.index(text) for text in (QUESTION, CALL.replace("\n", ""), WEATHER)]
    assert places == sorted(places) and len(stack.worker.requests) == 2


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_anthropics_client_runs_a_tool(
    claude: anthropic.AsyncAnthropic, stack: Stack, is_streamed: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 512,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }

    async def ask() -> Any:
        if not is_streamed:
            return await claude.messages.create(messages=messages, **fields)
        async with claude.messages.stream(messages=messages, **fields) as stream:
            return await stream.get_final_message()

    first = await ask()
    text, use = first.content
    assert first.stop_reason == "tool_use" and text.text == "I look."
    assert (use.name, use.input) == ("weather", {"city": "東京"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = await ask()
    assert last.stop_reason == "end_turn" and last.content[0].text == ANSWER
    assert_shown(stack)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_the_client_of_responses_runs_a_tool(
    client: openai.AsyncOpenAI, stack: Stack, is_stored: bool
) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "store": is_stored,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
    }
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await client.responses.create(input=asked, **fields)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "東京"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    if is_stored:
        fields["previous_response_id"] = first.id
        last = await client.responses.create(input=[result], **fields)  # type: ignore[list-item]
    else:
        last = await client.responses.create(input=[*asked, *first.output, result], **fields)
    assert last.output_text == ANSWER
    assert_shown(stack)


async def test_the_client_of_responses_parses_an_answer(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    class Step(pydantic.BaseModel):
        text: str
        number: int

    stack.worker.script = answer_with('{"text": "Hi", "number": 1}')
    answer = await client.responses.parse(model=MODEL, input="?", text_format=Step)
    assert answer.output_parsed == Step(text="Hi", number=1)
    found = grammar_of(stack)
    assert found is not None and "number" in found.source


@pytest.mark.slow  # its import takes seconds
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_agent_of_openai_agents_runs_a_tool(
    client: openai.AsyncOpenAI, stack: Stack, api: str, is_streamed: bool
) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    kind = "OpenAIChatCompletionsModel" if api == "chat" else "OpenAIResponsesModel"

    async def weather(city: str) -> str:
        assert city == "東京"
        return WEATHER

    agent = agents.Agent(
        name="Forecaster",
        instructions="Be brief.",
        model=getattr(agents, kind)(MODEL, client),
        tools=[agents.function_tool(weather)],
    )
    if is_streamed:
        run = agents.Runner.run_streamed(agent, QUESTION)
        names = [event.name async for event in run.stream_events() if hasattr(event, "name")]
        assert {"tool_called", "tool_output", "message_output_created"} <= set(names)
    else:
        run = await agents.Runner.run(agent, QUESTION)
    assert run.final_output == ANSWER
    assert_shown(stack)
