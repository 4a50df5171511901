"""A small real HTTP server that answers OpenAI requests as a test tells it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"


@dataclass
class Exchange:
    """One request, and the way to answer it."""

    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        """One HTTP chunk."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def start_stream(self, *extra: bytes) -> None:
        await self.send(HEAD + b"".join(line + b"\r\n" for line in extra) + b"\r\n")

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def send_json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 %d Status\r\nContent-Type: application/json\r\n" % status
        await self.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


Answer = Callable[[Exchange], Awaitable[None]]


@dataclass
class SseServer:
    """Where it listens and what it was asked."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)
    num_connections: int = 0

    @property
    def bodies(self) -> list[Any]:
        return [exchange.body for exchange in self.exchanges if exchange.body is not None]


class CloseConnection(Exception):
    """Raised by an answer: the server drops the connection now."""


def event(**fields: Any) -> bytes:
    """One server-sent event with a JSON object."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def usage_event(num_input: int, num_output: int, num_cached: int = 0) -> bytes:
    return event(
        choices=[],
        usage={
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    )


async def answer_in_full(exchange: Exchange) -> None:
    """As many one-token events as were asked for, usage, and [DONE]; models on GET."""
    if exchange.body is None:
        await exchange.send_json(200, {"object": "list", "data": [{"id": "tiny"}]})
        return
    num_output = exchange.body.get("max_tokens", 4)
    num_input = len(exchange.body.get("prompt", "x"))
    if not exchange.body.get("stream"):
        usage = {"prompt_tokens": num_input, "completion_tokens": num_output}
        choice = {"text": "a" * num_output, "finish_reason": "length"}
        await exchange.send_json(200, {"choices": [choice], "usage": usage})
        return
    await exchange.start_stream(b"x-tandem-prefill: local")
    for index in range(num_output):
        is_last = index == num_output - 1
        await exchange.send_chunk(text_event("a", "length" if is_last else None))
        await asyncio.sleep(0)
    await exchange.send_chunk(usage_event(num_input, num_output) + b"data: [DONE]\n\n")
    await exchange.end_stream()


HANDOFF = {
    "received": 0.0, "queued": 2.0, "claimed": 5.0, "computed": 20.0, "first_token": 21.0,
    "landed": 25.0, "verified": 25.5, "first_step": 30.0,
}  # fmt: skip


async def answer_with_timeline(exchange: Exchange) -> None:
    """Two tokens, and the course of a remote prefill for those who ask for it."""
    if exchange.body is None or exchange.headers.get("x-tandem-timeline") != "true":
        await answer_in_full(exchange)
        return
    course = {"prefill": "remote", "timeline_ms": HANDOFF, "predicted_ms": 16.8}
    last = {"index": 0, "text": "b", "finish_reason": "length", "tandem": course}
    reason = b"x-tandem-prefill-reason: uncached 9 > max_local_prefill_length 8"
    await exchange.start_stream(b"x-tandem-prefill: remote\r\n" + reason)
    await exchange.send_chunk(text_event("a"))
    await exchange.send_chunk(event(choices=[last]) + usage_event(3, 2) + b"data: [DONE]\n\n")
    await exchange.end_stream()


@asynccontextmanager
async def serving(answer: Answer = answer_in_full, port: int = 0) -> AsyncIterator[SseServer]:
    """A server on this loopback port, by default a free one; leaving closes every connection."""
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.add(writer)
        server.num_connections += 1
        try:
            while (exchange := await _read(reader, writer)) is not None:
                server.exchanges.append(exchange)
                await answer(exchange)
        except (CloseConnection, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", port)
    port = listener.sockets[0].getsockname()[1]
    server = SseServer(f"http://127.0.0.1:{port}")
    try:
        yield server
    finally:
        listener.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    request_line, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers.get("content-length", 0))
    body = json.loads(await reader.readexactly(length)) if length else None
    return Exchange(request_line.split(" ")[1], headers, body, writer)
