"""One HTTP request and its response, over the ASGI callables."""

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from tandem.frontend.access.limits import Client, Header
from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    UnauthorizedError,
    UnsupportedMediaError,
)
from tandem.frontend.http.open_bodies import BodyShare
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import OverloadedError, TandemError
from tandem.runtime.printable import short

CONNECTION = "tandem_connection"  # the key of a scope's `Connection`
JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_COMMENT = b": waiting\n\n"
_MAX_ID_BYTES = 256
_PRINTABLE = re.compile(rb"[ -~]+")
_UNPRINTABLE = re.compile(r"[^ -~]")


class ClientGoneError(Exception):
    """The client left while it was sending its request."""


class Connection(Protocol):
    """The connection of a request: the facts that ASGI tells only to those who wait for them."""

    def take_body(self) -> bytes | None:
        """Return the request's whole body; None if some of it has to be waited for."""

    def when_gone(self, callback: Callable[[], object]) -> None:
        """Call `callback` if the client leaves before the response is over; now if it has left."""

    def write_now(self, body: bytes) -> bool:
        """Write bytes of the present stream. False, without an effect, if that has to wait."""


class ErrorShape(Protocol):
    """Errors as the clients of one API read them."""

    def body(self, error: TandemError) -> bytes:
        """Return the JSON of an error."""

    def event(self, error: TandemError) -> bytes:
        """Return the last bytes of a stream that an error ends."""


class Exchange:
    """One request to read and one response to write, with the state of the response.

    The API of a request may replace `errors`, whose events can depend on those before them.
    """

    __slots__ = (
        "_connection", "_receive", "client", "errors", "has_events", "headers", "ignored",
        "is_gone", "is_over", "is_started", "send", "status", "traceparent",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, errors: ErrorShape) -> None:
        self.errors = errors
        self.client: Client | None = None  # the holder of the request's API key
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.ignored = Ignored()
        self._connection: Connection = scope[CONNECTION]
        self._receive = receive
        self.send = send
        self.is_started = False
        self.has_events = False  # in a stream; a comment is none
        self.is_over = False
        self.is_gone = False
        self.status = 0
        self.traceparent = ""  # of our span; empty where nothing takes spans

    @property
    def owner(self) -> str:
        """The name of the API key; empty without keys."""
        return "" if self.client is None else self.client.key.name

    def id_headers(self, request_id: str) -> list[Header]:
        """Return the headers about the request: its ids, trace, ignored fields, client's limits."""
        ours = request_id.encode()
        own = caller_id(self.headers.get(b"x-request-id", b""))
        ids = [(b"x-tandem-request-id", ours), (b"x-request-id", own or ours)]
        if self.traceparent:
            ids.append((b"traceresponse", self.traceparent.encode()))
        if ignored := str(self.ignored):
            ids.append((b"x-tandem-ignored", header_value(ignored)))
        return ids if self.client is None else ids + self.client.headers()

    def check_is_json(self) -> None:
        """Raise UnsupportedMediaError for a body that is not JSON by its headers.

        A page in a browser can send any other type to any server without asking it first.
        """
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            name = short(encoding.strip().lower().decode("latin-1"))
            raise UnsupportedMediaError(f"`Content-Encoding: {name}` is not supported")
        media_type = self.headers.get(b"content-type", b"")
        if media_type == b"application/json":  # as nearly always
            return
        media_type = media_type.partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            name = short(media_type.decode("latin-1")) or "missing"
            raise UnsupportedMediaError(f"`Content-Type` must be application/json; it is {name}")

    async def read_body(self, max_bytes: int, timeout_s: float, share: BodyShare) -> bytes:
        """Return the whole body. `share` grows with it and is the caller's to give back.

        Raises BodyTooLargeError as soon as the size is known, BodyTimeoutError, ClientGoneError,
        TooManyRequestsError.
        """
        body = self._connection.take_body()
        if body is not None:  # as nearly always
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            share.grow_to(len(body))
            return body
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_parts(max_bytes, share)
        except TimeoutError:
            raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s") from None

    async def _read_parts(self, max_bytes: int, share: BodyShare) -> bytes:
        parts: list[bytes] = []
        num_bytes, has_more = 0, True
        while has_more:
            message: Any = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            has_more = message.get("more_body", False)
            num_bytes += len(parts[-1])
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            share.grow_to(num_bytes)
        return b"".join(parts)  # a single part is not copied

    def cancel_when_gone(self, context: RequestContext) -> None:
        """Cancel `context` if the client leaves before the response is over."""

        def client_left() -> None:
            if not self.is_over:
                self.is_gone = True
                context.cancel("the client disconnected")

        self._connection.when_gone(client_left)

    async def respond(self, status: int, body: bytes, headers: list[Header]) -> None:
        """Send a whole JSON response."""
        length = (b"content-length", b"%d" % len(body))
        self.is_started = True
        self.status = status
        await self.send(
            {"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]}
        )
        self.is_over = True
        await self.send({"type": "http.response.body", "body": body})

    async def start_stream(self, headers: list[Header]) -> None:
        """Begin a stream of events. Its status and headers go out with the next `write`.

        After comments, which were sent with headers of their own, these are not sent any more.
        """
        self.has_events = True
        await self._start_stream(headers)

    async def comment_until_events(self, interval_s: float, headers: list[Header]) -> None:
        """Send comments at an interval, as long as the stream has no events."""
        while True:
            await asyncio.sleep(interval_s)
            if self.has_events or self.is_over:
                return
            await self._start_stream(headers)
            await self.write(_COMMENT)

    async def _start_stream(self, headers: list[Header]) -> None:
        if self.is_started:
            return
        self.is_started = True
        self.status = 200
        await self.send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*_STREAM_HEADERS, *headers],
            }
        )

    async def write(self, body: bytes) -> None:
        """Send bytes of the stream."""
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    def write_now(self, body: bytes) -> bool:
        """Send bytes of the stream. False, without an effect, where `write` would wait."""
        return self._connection.write_now(body)

    async def end_stream(self, body: bytes) -> None:
        """Send the stream's last bytes."""
        self.is_over = True
        await self.send({"type": "http.response.body", "body": body})

    async def respond_error(self, error: TandemError, headers: list[Header]) -> None:
        """Send an error with its status."""
        if isinstance(error, BodyTimeoutError):
            headers = [*headers, (b"connection", b"close")]  # the rest of the body may come
        if isinstance(error, OverloadedError):
            seconds = max(1, math.ceil(error.retry_after_s))
            headers = [*headers, (b"retry-after", b"%d" % seconds)]
        if isinstance(error, UnauthorizedError):
            headers = [*headers, (b"www-authenticate", b"Bearer")]
        await self.respond(error.status, self.errors.body(error), headers)


def caller_id(value: bytes) -> bytes:
    """Return the `x-request-id` of a caller; nothing for one that cannot go into a header."""
    return value if len(value) <= _MAX_ID_BYTES and _PRINTABLE.fullmatch(value) else b""


def header_value(text: str) -> bytes:
    """Return printable ASCII, which is all that a header can carry."""
    if not (text.isascii() and text.isprintable()):
        text = _UNPRINTABLE.sub("?", text)
    return text.encode()


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request's body is larger than {max_bytes} bytes")
