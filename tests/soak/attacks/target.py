"""The view of a cluster that strangers have: all its addresses, and not its token."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

ANSWER_S = 30.0  # no answer within it: the server hangs
HOLD_S = 0.5  # connections that a stranger keeps open stay for so long
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Target(msgspec.Struct, frozen=True):
    """The addresses of a cluster: `host:port` each, and the URLs of its services."""

    http: str
    nats_url: str
    etcd_url: str
    decode: str
    prefill: str
    namespace: str
    model: str
    deployment: str

    @property
    def workers(self) -> tuple[str, str]:
        return self.decode, self.prefill


# An attack returns the HTTP statuses that it got, if any.
Attack = Callable[[Target], Awaitable[list[int]]]


@asynccontextmanager
async def connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection, and drop it without a goodbye."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def send(address: str, *parts: bytes, hold_s: float = 0.0, pause_s: float = 0.0) -> None:
    """Send the parts on a connection, which may be refused at any time, and keep it for a while."""
    async with connected(address) as (_, writer):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
        await asyncio.sleep(hold_s)


async def exchange(target: Target, *parts: bytes) -> list[int]:
    """Send HTTP and return the statuses of all answers. Raise TimeoutError when none ends."""
    answer = bytearray()
    async with connected(target.http) as (reader, writer), asyncio.timeout(ANSWER_S):

        async def write() -> None:
            for part in parts:
                writer.write(part)
                await writer.drain()

        writing = asyncio.ensure_future(write())
        try:
            while part := await reader.read(65536):
                answer += part
        except ConnectionError:
            pass
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    return [int(status) for status in _STATUS.findall(answer)]


def request(
    target: Target,
    path: str,
    body: bytes,
    *headers: str,
    version: str = "1.1",
    method: str = "POST",
) -> bytes:
    """Return a whole HTTP request, after whose answer the connection ends."""
    lines = [
        f"{method} {path} HTTP/{version}",
        f"host: {target.http}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


async def post(target: Target, path: str, body: bytes, *headers: str) -> list[int]:
    """Post a body and return the statuses of its answer."""
    return await exchange(target, request(target, path, body, *headers))


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def completion(target: Target, **fields: Any) -> bytes:
    """Return the body of a small completion, or of one with other fields."""
    body = {"model": target.model, "prompt": "Hi", "max_tokens": 2}
    return json.dumps({**body, **fields}).encode()


def chat(target: Target, **fields: Any) -> bytes:
    """Return the body of a small chat, or of one with other fields."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return json.dumps({**body, **fields}).encode()


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """Return a body with one more field, whose value need not be JSON."""
    return body[:-1] + b',"%b":%b}' % (name.encode(), value)
