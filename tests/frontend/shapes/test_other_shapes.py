"""Text models behind the Responses and the Messages API: chats in another shape."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tandem.runtime.errors import InvalidRequestError
from tests.frontend.frontend_stack import FakeWorker, Stack
from tests.frontend.text.text_stack import TEXT_MODEL, add_text_worker, delta, says

CALL = {"index": 0, "id": "call_1", "type": "function"}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
ANSWERS: Any = [
    delta(None, reasoning_content="hm"),
    delta("Hel"),
    delta("lo"),
    delta(None, tool_calls=[CALL | {"function": {"name": "f", "arguments": ""}}]),
    delta(None, tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
    delta(None, "tool_calls", tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
    {"choices": [], "usage": USAGE},
]
TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
NAMESPACE: Any = [{"type": "namespace", "name": "n", "tools": TOOLS}]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(num_workers=0) as running:
        yield running


@pytest.fixture
async def worker(stack: Stack) -> FakeWorker:
    return await add_text_worker(stack, says(*ANSWERS))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_made_of_the_workers_chunks(
    client: openai.AsyncOpenAI, worker: FakeWorker, stream: bool
) -> None:
    fields: Any = {"model": TEXT_MODEL, "input": "Hi", "tools": TOOLS, "max_output_tokens": 9}
    if stream:
        async with client.responses.stream(**fields) as events:
            response = await events.get_final_response()
    else:
        response = await client.responses.create(**fields)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content and message.type == "message"
    assert reasoning.content[0].text == "hm" and response.output_text == "Hello"
    assert call.type == "function_call" and (call.call_id, call.name) == ("call_1", "f")
    assert json.loads(call.arguments) == {"a": 1} and response.status == "completed"
    assert response.usage is not None and response.usage.total_tokens == 12
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    body = json.loads(worker.text_requests[0].body)
    function = {"name": "f", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["max_completion_tokens"] == 9 and body["tool_choice"] == "auto"
    assert body.get("stream_options") == ({"include_usage": True} if stream else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_made_of_the_workers_chunks(
    claude: anthropic.AsyncAnthropic, worker: FakeWorker, stream: bool
) -> None:
    fields: Any = {
        "model": TEXT_MODEL,
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 0}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_0", "content": "one"},
                {"type": "text", "text": "And?"},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
    }  # fmt: skip
    if stream:
        async with claude.messages.stream(**fields) as events:
            message = await events.get_final_message()
    else:
        message = await claude.messages.create(**fields)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].type == "tool_use" and message.content[2].input == {"a": 1}
    assert message.stop_reason == "tool_use" and message.usage.output_tokens == 5
    body = json.loads(worker.text_requests[0].body)
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a":0}'}}
    assert [*body["messages"]] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "one"},
        {"role": "user", "content": "And?"},
    ]
    assert body["tool_choice"] == "required" and body["parallel_tool_calls"] is False
    assert body["reasoning_effort"] == "none"


async def test_a_function_of_a_namespace_has_its_own_name_again(
    stack: Stack, worker: FakeWorker
) -> None:
    named = [dict(each) for each in ANSWERS]
    named[3] = delta(None, tool_calls=[CALL | {"function": {"name": "n__f", "arguments": ""}}])
    worker.text_script = says(*named)
    history = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "one"},
    ]
    body = {"model": TEXT_MODEL, "input": history, "tools": NAMESPACE}
    response = (await stack.http.post("/v1/responses", json=body)).json()
    assert (response["output"][-1]["name"], response["output"][-1]["namespace"]) == ("f", "n")
    assert response["tools"][0]["name"] == "n"
    sent = json.loads(worker.text_requests[0].body)
    assert sent["tools"][0]["function"]["name"] == "n__f"
    assert sent["messages"][1]["tool_calls"][0]["function"]["name"] == "n__f"


@pytest.mark.parametrize("is_valid", [True, False])
async def test_log_probabilities_of_the_worker_are_those_of_the_text(
    stack: Stack, worker: FakeWorker, is_valid: bool
) -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    chunk: Any = delta("Hi", "stop")
    chunk["choices"][0]["logprobs"] = {"content": [token if is_valid else {"token": 1}]}
    worker.text_script = says(chunk)
    include = ["message.output_text.logprobs"]
    body = {"model": TEXT_MODEL, "input": "Hi", "include": include, "top_logprobs": 0}
    response = await stack.http.post("/v1/responses", json=body)
    sent = json.loads(worker.text_requests[0].body)
    assert sent["logprobs"] is True and sent["top_logprobs"] == 0
    assert response.status_code == (200 if is_valid else 502), response.text
    if is_valid:
        assert response.json()["output"][0]["content"][0]["logprobs"] == [token]


async def test_a_schema_for_the_answer_is_passed_on(stack: Stack, worker: FakeWorker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = {"model": TEXT_MODEL, "input": "Hi", "text": {"format": form}}
    response = (await stack.http.post("/v1/responses", json=body)).json()
    assert response["text"]["format"] == form
    sent = json.loads(worker.text_requests[0].body)["response_format"]
    inner = {"name": "x", "schema": schema, "strict": True}
    assert sent == {"type": "json_schema", "json_schema": inner}


async def test_the_client_parses_an_answer_by_its_own_model(
    client: openai.AsyncOpenAI, worker: FakeWorker
) -> None:
    class Found(BaseModel):
        a: int

    worker.text_script = says(delta('{"a": 3}', "stop"))
    response = await client.responses.parse(model=TEXT_MODEL, input="Hi", text_format=Found)
    assert response.output_parsed == Found(a=3)
    sent = json.loads(worker.text_requests[0].body)["response_format"]["json_schema"]
    assert sent["strict"] is True and sent["schema"]["required"] == ["a"]


async def test_an_error_of_the_worker_ends_the_stream_in_the_shape_of_its_api(
    stack: Stack, worker: FakeWorker
) -> None:
    worker.text_script = says(
        delta("Hel"), error=InvalidRequestError("no", param="tools[0].function")
    )
    responses = {"model": TEXT_MODEL, "input": "Hi", "stream": True}
    text = (await stack.http.post("/v1/responses", json=responses)).text
    assert text.endswith("data: [DONE]\n\n") and "event: response.failed" in text
    messages = {"model": TEXT_MODEL, "max_tokens": 9, "stream": True}
    messages |= {"messages": [{"role": "user", "content": "Hi"}]}
    text = (await stack.http.post("/v1/messages", json=messages)).text
    assert "event: error" in text.split("\n\n")[-2]


async def test_a_text_model_counts_no_tokens(stack: Stack, worker: FakeWorker) -> None:
    body = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    response = await stack.http.post("/v1/messages/count_tokens", json=body)
    assert response.status_code == 400 and "tokenizer" in response.json()["error"]["message"]
