"""A small HTTP/1.1 client on asyncio.Protocol: the load generator's connection to the server.

Bytes go from the socket through httptools' C parser straight to a sink, with one clock reading per
read of the socket. Where every event is a read of its own that takes 12 us of CPU per event, where
aiohttp takes 20 (64 streams, uvloop): on a small machine the client's CPU time is the server's.
"""

import asyncio
import ssl
import time
from collections import deque
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tandem.runtime.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0


class ExchangeError(Exception):
    """One exchange failed on its connection; `kind` is what reports count it under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StaleConnectionError(ExchangeError):
    """A kept-alive connection was closed before any byte of the answer; safe to send again."""

    def __init__(self) -> None:
        super().__init__("closed_early", "the server closed an idle connection")


class ResponseSink(Protocol):
    """The sink of a response as it arrives; `now_s` is perf_counter at the read of the socket."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def on_body(self, data: bytes, now_s: float) -> None: ...


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._done: asyncio.Future[float] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._num_exchanges = 0
        self._got_bytes = False
        self._got_head = False
        self._now_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, sink: ResponseSink) -> float:
        """Send one request and feed its response to the sink; perf_counter at its last byte.

        Raises ExchangeError. Cancelling closes the connection.
        """
        if self._transport is None or self._transport.is_closing():
            raise StaleConnectionError
        self._sink = sink
        self._headers = {}
        self._got_bytes = self._got_head = False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._num_exchanges += 1
            self._sink = self._done = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._done is None:  # bytes without a request
            self.close()
            return
        self._got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(ExchangeError("protocol", f"not HTTP: {exc.__context__ or exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is None or self._done.done():
            return
        if not self._got_bytes and self._num_exchanges:
            self._fail(StaleConnectionError())
        elif exc is None and self._got_head and not self._is_framed():
            self._finish()
        else:
            reason = f": {exc}" if exc else ""
            when = "mid-response" if self._got_bytes else "before the response"
            self._fail(ExchangeError("closed_early", f"the server closed {when}{reason}"))

    # ---- httptools ----

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # 1xx are interim
            self._got_head = True
            if self._sink is not None:
                self._sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data, self._now_s)

    def on_message_complete(self) -> None:
        if not self._got_head:
            self._headers = {}
            return
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._finish()

    def _is_framed(self) -> bool:
        return b"content-length" in self._headers or b"transfer-encoding" in self._headers

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._now_s)

    def _fail(self, error: ExchangeError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class ConnectionPool:
    """Keep-alive connections to one base URL, grown on demand; the latest used is used first."""

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"{base_url!r} is not an http:// or https:// URL")
        self.host = url.netloc.rpartition("@")[2]
        self.path_prefix = url.path.rstrip("/").removesuffix("/v1")
        self.num_reconnects = 0
        self._hostname = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._idle: deque[HttpConnection] = deque()

    async def warm(self, num_connections: int) -> None:
        """Open connections ahead of the load. Raises ExchangeError."""
        connections = [await self._connect() for _ in range(num_connections - len(self._idle))]
        self._idle.extend(connections)

    async def acquire(self) -> HttpConnection:
        """Return an open connection. Raises ExchangeError of kind `connect`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._connect()

    def release(self, connection: HttpConnection) -> None:
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> HttpConnection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    HttpConnection, self._hostname, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as exc:
            reason = str(exc) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            address = f"{self._hostname}:{self._port}"
            raise ExchangeError("connect", f"cannot connect to {address}: {reason}") from exc
        return connection
