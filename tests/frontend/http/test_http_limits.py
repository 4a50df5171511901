"""The bounds of the HTTP server itself: heads, bodies that do not end, requests at one time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send

from tandem.frontend.access.room import Room
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import TooManyRequestsError
from tandem.frontend.http.api import Call, Work
from tandem.frontend.http.exchange import Exchange
from tandem.frontend.http.open_bodies import BodyShare
from tandem.frontend.http.response import DirectResponse
from tandem.frontend.openai.api import OpenAIApi
from tests.frontend.frontend_stack import MODEL, Stack, one_token_then_wait
from tests.services import eventually

BODY = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 64, "stream": True}).encode()


@asynccontextmanager
async def connected(
    stack: Stack,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = stack.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(version: str = "1.1", *lines: str, length: int = len(BODY)) -> bytes:
    """The head of a request for a completion."""
    fields = [
        f"POST /v1/completions HTTP/{version}",
        "content-type: application/json",
        f"content-length: {length}",
        *lines,
    ]
    return ("\r\n".join(fields) + "\r\n\r\n").encode()


async def answer_to(stack: Stack, *parts: bytes) -> bytes:
    """All that comes back until the connection ends."""
    async with connected(stack) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        return await reader.read()


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 ")
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "parts",
    [[b"x" * 3000 + b"\r\nhost: localhost\r\n\r\n"], [b"x" * 1000, b"x" * 1000, b"x" * 1100]],
    ids=["whole", "without end"],
)
async def test_a_head_that_is_too_large_is_a_431(parts: list[bytes]) -> None:
    async with Stack(config=FrontendConfig(port=0, max_head_bytes=2048)) as stack:
        answer = await answer_to(stack, b"GET /live HTTP/1.1\r\nx-large: ", *parts)
        assert status_of(answer) == 431 and b"2048" in answer and b"x-request-id" in answer
        assert (await stack.http.get("/live")).status_code == 200


async def test_heads_one_after_another_are_counted_each_for_itself() -> None:
    async with Stack(config=FrontendConfig(port=0, max_head_bytes=1024)) as stack:
        for _ in range(10):
            response = await stack.http.get("/live", headers={"x-some": "x" * 500})
            assert response.status_code == 200


async def test_half_a_head_is_a_408() -> None:
    for start in [b"POST /v1/comp", b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-a: "]:
        async with Stack(config=FrontendConfig(port=0, head_timeout_s=0.1)) as stack:
            assert status_of(await answer_to(stack, start)) == 408


@pytest.mark.parametrize("fields", [{"head_timeout_s": 0.3}, {"keep_alive_s": 1}], ids=str)
async def test_a_connection_that_asks_for_nothing_is_closed(fields: dict[str, Any]) -> None:
    """At the time of the first head, or between requests, whatever empty lines it sends."""
    is_first = "head_timeout_s" in fields

    async def check(pause_s: float | None) -> None:
        async with connected(stack) as (reader, writer):
            if not is_first:
                writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await reader.readuntil(b'{"status":"live"}')
            answer = asyncio.create_task(reader.read())
            while pause_s is not None and not answer.done():
                writer.write(b"\r\n")
                await asyncio.wait([answer], timeout=pause_s)
            with suppress(ConnectionResetError):  # an empty line that came after the end
                assert await answer == b""

    async with Stack(config=FrontendConfig(port=0, **fields)) as stack:
        await asyncio.gather(check(None), check(0.05))


async def test_other_versions_of_http_are_refused(stack: Stack) -> None:
    for line in ["GET /live", "GET /live HTTP/0.9", "GET /live HTTP/2.0"]:
        answer = await answer_to(stack, f"{line}\r\nhost: localhost\r\n\r\n".encode())
        assert status_of(answer) == 400 and b"connection: close" in answer
        answer = await answer_to(stack, f"{line}\r\n\r\n".encode())
        assert status_of(answer) == 400 and b"live" not in answer


async def test_an_answer_that_takes_longer_than_a_head_may_goes_on() -> None:
    async with Stack(config=FrontendConfig(port=0, head_timeout_s=0.05)) as stack:
        stack.worker.script = one_token_then_wait
        async with connected(stack) as (reader, writer):
            writer.write(head("1.1", "host: localhost") + BODY + b"GET /li")
            await reader.readuntil(b"data: ")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 408"), 0.3)


async def test_a_request_without_a_host_is_a_400(stack: Stack) -> None:
    answer = await answer_to(stack, head() + BODY)
    assert status_of(answer) == 400 and b"Host" in answer
    assert status_of(await answer_to(stack, head("1.1", "host: a", "host: b") + BODY)) == 400
    assert not stack.worker.requests


async def test_a_client_of_http_1_0_gets_no_chunks(stack: Stack) -> None:
    for stream in [True, False]:
        body = json.dumps({**json.loads(BODY), "stream": stream}).encode()
        answer = await answer_to(stack, head("1.0", length=len(body)) + body)
        headers, _, content = answer.partition(b"\r\n\r\n")
        assert status_of(answer) == 200
        assert (
            b"transfer-encoding" not in headers.lower() and b"connection: close" in headers.lower()
        )
        if stream:
            assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"]


async def test_a_client_that_leaves_after_a_large_body_cancels_its_worker(stack: Stack) -> None:
    stack.worker.script = one_token_then_wait
    body = BODY + b" " * 200_000  # more than is read without a pause
    async with connected(stack) as (reader, writer):
        writer.write(head("1.1", "host: localhost", length=len(body)) + body)
        await reader.readuntil(b"\r\n\r\n")
    await eventually(lambda: stack.worker.contexts[0].is_cancelled)


def new_cycle() -> Mock:
    """Return a request of HTTP/1.1 whose response has not begun."""
    cycle = Mock(disconnected=False, response_started=False, response_complete=False)
    cycle.flow.write_paused = False
    cycle.default_headers = [(b"date", b"now")]
    cycle.scope = {"http_version": "1.1"}
    return cycle


async def test_the_head_of_a_stream_goes_out_with_its_first_event() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    cycle = new_cycle()
    await DirectResponse(app, cycle)({}, Mock(), Mock())
    first, last = (call.args[0] for call in cycle.transport.write.call_args_list)
    head = b"HTTP/1.1 200 OK\r\ndate: now\r\ntransfer-encoding: chunked\r\n\r\n"
    assert first == head + b"3\r\none\r\n"
    assert last == b"3\r\ntwo\r\n0\r\n\r\n"


async def test_an_event_is_written_at_once_unless_it_has_to_wait() -> None:
    cycle = new_cycle()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not response.write_now(b"before the head")
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        assert response.write_now(b"two")
        cycle.flow.write_paused = True
        assert not response.write_now(b"too much")
        cycle.disconnected = True
        assert response.write_now(b"to nobody")

    response = DirectResponse(app, cycle)
    await response({}, Mock(), Mock())
    _, second = (call.args[0] for call in cycle.transport.write.call_args_list)
    assert second == b"3\r\ntwo\r\n"


async def test_bodies_that_do_not_end_leave_room_for_small_requests() -> None:
    config = FrontendConfig(port=0, max_open_body_bytes=100_000, body_timeout_s=60)
    async with Stack(config=config) as stack:
        async with connected(stack) as (_, first), connected(stack) as (reader, second):
            large = head("1.1", "host: localhost", length=90_000) + b" " * 89_000
            first.write(large)
            await first.drain()
            await eventually(lambda: stack.server.handler._bodies.num_taken > 70_000)
            second.write(large)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert status_of(answer) == 429 and b"retry-after: 1" in answer
            assert (await stack.chat()).status_code == 200
        await eventually(lambda: stack.server.handler._bodies.num_taken == 0)
        assert (await stack.complete(user="x" * 60_000)).status_code == 200


def test_the_shares_of_bodies_end_with_them() -> None:
    bodies = Room(100_000)
    one, two = BodyShare(bodies, ""), BodyShare(bodies, "")
    one.grow_to(10_000)
    one.grow_to(100_000)
    two.grow_to(16_384)
    with pytest.raises(TooManyRequestsError):
        two.grow_to(50_000)
    one.give_back()
    one.give_back()
    two.grow_to(116_384)
    with pytest.raises(TooManyRequestsError):
        one.grow_to(16_385)


async def test_no_two_large_bodies_are_read_in_one_pass_of_the_event_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams stand still while one is read, and not while all that have come are."""
    num_passes = num_there = 0
    began: list[int] = []
    all_there = asyncio.Event()
    read_body, prepare = Exchange.read_body, OpenAIApi.prepare

    async def read_with_others(self: Exchange, *args: Any) -> bytes:
        nonlocal num_there
        raw = await read_body(self, *args)
        num_there += 1
        await all_there.wait()
        return raw

    async def noted(self: OpenAIApi, raw: bytes, call: Call) -> Work:
        began.append(num_passes)
        return await prepare(self, raw, call)

    monkeypatch.setattr(Exchange, "read_body", read_with_others)
    monkeypatch.setattr(OpenAIApi, "prepare", noted)
    asking = asyncio.gather(*(stack.complete(prompt=[1] * 40_000) for _ in range(6)))
    await eventually(lambda: num_there == 6)
    all_there.set()
    while not asking.done():
        num_passes += 1
        await asyncio.sleep(0)
    assert [each.status_code for each in await asking] == [400] * 6  # beyond the context
    assert len({*began}) == len(began) == 6


async def test_requests_beyond_the_limit_are_a_429() -> None:
    async with Stack(config=FrontendConfig(port=0, max_inflight_requests=2)) as stack:
        stack.worker.script = one_token_then_wait
        running = [asyncio.create_task(stack.chat()) for _ in range(2)]
        await eventually(lambda: len(stack.worker.requests) == 2)
        response = await stack.chat()
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert error["type"] == "overloaded_error" and error["code"] == "too_many_requests"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: stack.server.handler._answering.num_taken == 0)
        stack.worker.script = None
        assert (await stack.chat()).status_code == 200
