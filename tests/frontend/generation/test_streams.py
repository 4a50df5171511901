"""Bad days in the middle of an answer, and stop strings, through the whole frontend."""

import asyncio
import json

from tandem.frontend.config import FrontendConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CapacityError,
    InternalError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest, TokenDelta, encode
from tests.frontend.frontend_stack import (
    ANSWER,
    MODEL,
    Stack,
    answer_with,
    choices_of,
    error_event,
    one_token_then_wait,
    sending,
    text_of,
    token_ids,
)
from tests.services import eventually

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}


async def wait(_request: GenerateRequest, context: RequestContext, _responder: Responder) -> None:
    await context.cancelled()
    context.raise_if_done()


async def test_a_client_that_leaves_a_stream_cancels_its_worker(stack: Stack) -> None:
    stack.worker.script = one_token_then_wait
    async with stack.http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        async for _ in response.aiter_bytes():
            break
    await stack.worker.contexts[0].cancelled()
    await eventually(lambda: not stack.worker.server.running)
    await eventually(lambda: 'status="499"' in stack.metrics())
    assert 'tandem_frontend_inflight_requests{model="test/model"} 0.0' in stack.metrics()


async def test_a_client_that_does_not_read_holds_its_worker_up_and_loses_nothing(
    stack: Stack,
) -> None:
    delta = encode(TokenDelta(token_ids("<added word>") * 500))
    num_deltas = 3000  # 18 MB, more than the sockets hold
    has_waited = False

    async def many(
        _request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        nonlocal has_waited
        for _ in range(num_deltas):
            if not responder.has_room:
                has_waited = True
                await responder.drain()
            responder.send(delta)
        responder.send(encode(TokenDelta([], "length")))

    stack.worker.script = many
    async with stack.http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        await eventually(lambda: has_waited)
        await response.aread()
        assert text_of(response) == "<added word>" * 500 * num_deltas


async def test_a_client_that_leaves_before_the_answer_cancels_its_worker(stack: Stack) -> None:
    stack.worker.script = wait
    asking = asyncio.create_task(stack.chat())
    await stack.worker.called.wait()
    asking.cancel()
    await stack.worker.contexts[0].cancelled()
    await eventually(lambda: "disconnected_clients_total" in stack.metrics())


async def test_a_worker_that_dies_after_a_token_and_has_no_successor_gives_an_error_event() -> None:
    async with Stack(config=FrontendConfig(port=0, migration_wait_s=0)) as stack:
        stack.worker.script = one_token_then_wait
        async with stack.http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
            parts = response.aiter_text()
            text = await anext(parts)
            stack.worker.cut()
            text += "".join([part async for part in parts])
    assert response.status_code == 200
    error = error_event(text)
    assert "error id" in str(error["message"]) and error["type"] == "server_error"
    assert stack.worker.server.address not in text
    assert "[DONE]" not in text


async def test_a_worker_that_dies_before_a_token_is_replaced_by_another() -> None:
    async with Stack(num_workers=2) as stack:
        stack.workers[1].script = sending(error=UnavailableError("going away"))
        for _ in range(4):
            response = await stack.chat()
            assert response.json()["choices"][0]["message"]["content"] == ANSWER
            assert response.headers["x-tandem-decode-instance"] == stack.workers[0].instance_id
        assert len(stack.workers[1].requests) <= 1  # it was left out after its failure


async def test_without_a_worker_it_is_a_503_with_retry_after() -> None:
    async with Stack(config=FrontendConfig(port=0, return_wait_s=0)) as stack:
        await stack.worker.leave()
        await eventually(lambda: not stack.server.catalog.models)
        for response in (await stack.chat(), await stack.chat(stream=True)):
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "overloaded_error"


async def test_an_overloaded_worker_is_a_503_with_its_own_retry_after(stack: Stack) -> None:
    stack.worker.script = sending(error=OverloadedError("queue is full", retry_after_s=7))
    response = await stack.chat(stream=True)
    assert response.status_code == 503 and response.headers["retry-after"] == "7"
    stack.worker.script = None
    assert (await stack.chat()).status_code == 200  # it was not left out


async def test_a_request_too_large_for_the_worker_says_the_numbers(stack: Stack) -> None:
    stack.worker.script = sending(error=CapacityError("needs 900 blocks, the pool has 100"))
    response = await stack.chat()
    assert response.status_code == 500 and "900" in response.json()["error"]["message"]


async def test_internal_errors_show_an_id_only(stack: Stack) -> None:
    errors: list[TandemError | Exception] = [InternalError("secret"), ValueError("secret")]
    for error in errors:
        stack.worker.script = sending(error=error)
        response = await stack.chat(stream=True)
        assert response.status_code == 500
        assert "secret" not in response.text and "error id" in response.text


async def test_a_deadline_before_the_first_token_is_a_504_and_after_it_an_event() -> None:
    async with Stack(config=FrontendConfig(port=0, request_timeout_s=1.0)) as stack:
        stack.worker.script = wait
        asking = asyncio.create_task(stack.chat())
        await stack.worker.called.wait()
        stack.worker.script = one_token_then_wait
        response = await stack.chat(stream=True)
        assert response.status_code == 200
        assert error_event(response.text)["code"] == "deadline"
        assert (await asking).status_code == 504


async def test_a_stop_string_across_tokens_ends_the_answer_and_the_worker(stack: Stack) -> None:
    endless = answer_with(ANSWER + " and on " * 20)

    async def script(
        request: GenerateRequest, context: RequestContext, responder: Responder
    ) -> None:
        await endless(request, context, responder)
        await context.cancelled()

    stack.worker.script = script
    for stream in (False, True):
        response = await stack.chat(stop=["ld 😀", "never"], stream=stream, max_tokens=64)
        assert text_of(response) == "Hello wör"
        assert choices_of(response)[-1]["finish_reason"] == "stop"
    for context in stack.worker.contexts:
        await context.cancelled()


async def test_a_stop_string_within_min_tokens_does_not_count(stack: Stack) -> None:
    stack.worker.script = answer_with("a.b.c", tokens_per_delta=5)
    response = await stack.chat(stop=".", min_tokens=3, max_tokens=20)
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "a.b"
    assert body["usage"]["completion_tokens"] == 4


async def test_a_drain_refuses_new_requests_and_finishes_old_ones(stack: Stack) -> None:
    release = asyncio.Event()

    async def script(
        request: GenerateRequest, context: RequestContext, responder: Responder
    ) -> None:
        await release.wait()
        await answer_with(ANSWER)(request, context, responder)

    stack.worker.script = script
    asking = asyncio.create_task(stack.chat())
    await stack.worker.called.wait()
    draining = asyncio.create_task(stack.server.drain())
    await eventually(lambda: stack.server.handler.is_draining)
    assert (await stack.http.get("/health")).status_code == 503
    refused = await stack.chat()
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert not [key for key in stack.store.items if "/frontend/" in key]
    release.set()
    assert (await asking).json()["choices"][0]["message"]["content"] == ANSWER
    await draining


async def test_a_malformed_delta_is_an_error_and_not_a_hang(stack: Stack) -> None:
    async def script(
        _request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        responder.send(b"\xc1")

    stack.worker.script = script
    assert (await stack.chat()).status_code == 502


async def test_a_sequence_that_ends_without_a_reason_is_an_error(stack: Stack) -> None:
    stack.worker.script = sending(TokenDelta(token_ids("H")))
    response = await stack.chat(stream=True)
    assert error_event(response.text)["type"] == "server_error"


async def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    host, _, port = stack.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for content in ("one", "two", "three"):
        body = json.dumps({"model": MODEL, "prompt": content, "echo": True, "max_tokens": 1})
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {content}\r\n\r\n{body}".encode()
        )
    for content in ("one", "two", "three"):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert f"x-request-id: {content}" in head
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        assert answer["choices"][0]["text"].startswith(content)
    writer.close()
    await writer.wait_closed()
