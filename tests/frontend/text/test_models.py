"""Models that read and write text themselves, from HTTP to the worker and back."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import IncompleteError, InvalidRequestError, OverloadedError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import TextRequest
from tests.frontend.frontend_stack import MODEL, Stack, error_event, events_of
from tests.frontend.text.text_stack import TEXT_MODEL, add_text_worker, delta, piece, says
from tests.services import eventually

HELLO = (delta("Hel", role="assistant"), delta("lo"), delta(None, "stop"))
WHOLE: dict[str, Any] = {
    "id": "chatcmpl-own",
    "object": "chat.completion",
    "created": 5,
    "model": TEXT_MODEL,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(num_workers=0) as running:
        yield running


async def chat(stack: Stack, **fields: object) -> httpx.Response:
    return await stack.chat(model=TEXT_MODEL, **fields)


async def test_a_streamed_chat_passes_the_workers_chunks_on(stack: Stack) -> None:
    worker = await add_text_worker(stack, says(*HELLO))
    response = await chat(stack, stream=True, anything={"of": "ours"})
    events: list[Any] = events_of(response)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "Hello"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert {(e["id"][:9], e["object"], e["model"]) for e in events} == {
        ("chatcmpl-", "chat.completion.chunk", TEXT_MODEL)
    }
    assert response.headers["x-tandem-decode-instance"] == worker.instance_id
    (request,) = worker.text_requests
    assert (request.kind, request.model) == ("chat", TEXT_MODEL)
    assert json.loads(request.body)["anything"] == {"of": "ours"}


async def test_chunks_become_one_answer_for_a_client_that_does_not_stream(stack: Stack) -> None:
    await add_text_worker(stack, says(*HELLO, {"choices": [], "usage": WHOLE["usage"]}))
    answer = (await chat(stack)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == WHOLE["usage"]


async def test_a_whole_answer_is_one_chunk_of_a_stream(stack: Stack) -> None:
    await add_text_worker(stack, says(WHOLE))
    assert (await chat(stack)).json()["choices"][0]["message"] == WHOLE["choices"][0]["message"]
    options = {"include_usage": True}
    events: list[Any] = events_of(await chat(stack, stream=True, stream_options=options))
    chunk, usage = events
    assert chunk["id"] == usage["id"] == "chatcmpl-own"
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"] == [
        {"index": 0, "finish_reason": "stop", "delta": {"role": "assistant", "content": "Hello"}}
    ]
    assert (usage["choices"], usage["usage"]) == ([], WHOLE["usage"])
    (alone,) = events_of(await chat(stack, stream=True))
    assert "usage" not in alone


async def test_completions_of_several_choices_are_put_together(stack: Stack) -> None:
    await add_text_worker(stack, says(piece("b", index=1), piece("a"), piece("A", "length")))
    answer = (await stack.complete(model=TEXT_MODEL)).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "aA", "length"),
        (1, "b", "stop"),
    ]
    assert answer["id"].startswith("cmpl-")
    events: list[Any] = events_of(await stack.complete(model=TEXT_MODEL, stream=True))
    last = events[-1]["choices"]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in last] == [(1, "", "stop")]


async def test_the_official_client_reads_both_kinds(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    await add_text_worker(stack, says(*HELLO))
    messages: Any = [{"role": "user", "content": "Hi"}]
    whole = await client.chat.completions.create(model=TEXT_MODEL, messages=messages)
    assert whole.choices[0].message.content == "Hello"
    stream = await client.chat.completions.create(model=TEXT_MODEL, messages=messages, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Hello"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": "Hi"}, "messages"),
    ("chat/completions", {"messages": ["Hi"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ("chat/completions", {}, "messages"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": "Hi", "stream": "yes"}, "stream"),
    ("completions", {"prompt": "Hi", "stream_options": {}}, "stream_options"),
    ("completions", {"prompt": "Hi", "model": "m" * 2**16}, "model"),
    ("completions", {"prompt": "Hi", "stream_options": {"a": "x" * 2**16}}, "stream_options"),
    (
        "completions",
        {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
]


async def test_a_bad_body_is_refused_by_the_field(stack: Stack) -> None:
    worker = await add_text_worker(stack, says(*HELLO))
    for path, fields, param in WRONG:
        response = await stack.http.post(f"/v1/{path}", json={"model": TEXT_MODEL} | fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param
    assert not worker.text_requests


async def test_a_route_that_the_model_is_not_served_on_is_refused_by_name(stack: Stack) -> None:
    await add_text_worker(stack, says(piece("a", "stop")), model_types=["completions"])
    response = await chat(stack)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        f"model {TEXT_MODEL!r} is not served at /v1/chat/completions, but at /v1/completions"
    )
    assert (await stack.complete(model=TEXT_MODEL)).status_code == 200


async def test_a_token_model_beside_a_text_model_is_served_as_ever(stack: Stack) -> None:
    await add_text_worker(stack, says(*HELLO))
    await stack.add_worker()
    await eventually(lambda: len(stack.server.catalog.models) == 2)
    assert (await stack.chat()).json()["choices"][0]["message"]["content"] == "Hello wörld 😀!"
    assert (await chat(stack)).json()["choices"][0]["message"]["content"] == "Hello"
    listed = (await stack.http.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} == {MODEL, TEXT_MODEL}
    assert (await stack.chat(tools=[1])).json()["error"]["param"] == "tools[0]"


async def test_a_worker_that_is_lost_before_it_answered_is_replaced(stack: Stack) -> None:
    bad = await add_text_worker(stack, says(error=IncompleteError("going")))
    good = await add_text_worker(stack, says(*HELLO))
    num_answers = 0
    while num_answers < 8 or not bad.text_requests:  # among equals, chance chooses
        response = await chat(stack, stream=num_answers % 2 == 0)
        assert response.status_code == 200
        assert response.headers["x-tandem-decode-instance"] == good.instance_id
        num_answers += 1
    assert 'migrations_total{kind="new_request",model="test/text"}' in stack.metrics()


async def test_a_whole_answer_is_begun_anew_and_says_nothing_twice(stack: Stack) -> None:
    await add_text_worker(stack, says(HELLO[0], error=IncompleteError("going")))
    await add_text_worker(stack, says(*HELLO))
    for _ in range(4):
        assert (await chat(stack)).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_stream_that_breaks_off_ends_with_an_error_event(stack: Stack) -> None:
    await add_text_worker(stack, says(HELLO[0], error=IncompleteError("going")))
    error = error_event((await chat(stack, stream=True)).text)
    assert error["code"] == "incomplete"
    assert "going" not in str(error["message"])


async def test_without_migration_the_first_failure_is_the_end(stack: Stack) -> None:
    for _ in range(2):
        await add_text_worker(stack, says(error=OverloadedError("full")), migration_limit=0)
    response = await chat(stack)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert sum(len(worker.text_requests) for worker in stack.workers) == 1
    assert response.headers["retry-after"] == "1"


async def test_a_workers_refusal_reaches_the_client(stack: Stack) -> None:
    error = InvalidRequestError("`messages` has an image", param="messages")
    await add_text_worker(stack, says(error=error))
    response = await chat(stack)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


NO_ANSWERS: list[Any] = [
    b"no",
    b"[]",
    {},
    {"choices": [1]},
    {"choices": [{"text": "a"}]},
    {"error": "secret"},
]


async def test_what_is_no_answer_is_an_error_without_its_text(stack: Stack) -> None:
    worker = await add_text_worker(stack, says())
    for answer in NO_ANSWERS:
        worker.text_script = says(answer)
        response = await chat(stack)
        assert response.status_code in (500, 502), answer
        assert "error id" in response.json()["error"]["message"]
        assert "secret" not in response.text


async def test_a_worker_that_says_nothing_is_an_error(stack: Stack) -> None:
    await add_text_worker(stack, says())
    assert (await chat(stack)).json()["error"]["code"] == "protocol"


async def test_requests_go_to_the_worker_with_less_to_do(stack: Stack) -> None:
    async def waits(_: TextRequest, context: RequestContext, responder: Responder) -> None:
        responder.send(json.dumps(HELLO[0]).encode())
        await context.cancelled()

    busy = await add_text_worker(stack, waits)
    body = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        idle = await add_text_worker(stack, says(*HELLO))
        for _ in range(3):
            answered = await chat(stack)
            assert answered.headers["x-tandem-decode-instance"] == idle.instance_id
        assert not busy.contexts[0].is_cancelled
    await eventually(lambda: busy.contexts[0].is_cancelled)
