"""HTTP/1 as the frontend speaks it: uvicorn's protocol with bounds on a request's head.

A head is the request line and the headers. It has a size and a time, and names its host. The time
of the first one counts from the begin of the connection.
"""

import asyncio
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, NoReturn

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import http_error_body
from tandem.frontend.http.exchange import CONNECTION
from tandem.frontend.http.response import DirectResponse
from tandem.runtime.address import new_id

_NAME = itemgetter(0)  # of a header
_VERSIONS = ("1.1", "1.0")


class _RefusedError(Exception):
    """The head is refused. The parser turns it into the error that uvicorn answers."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection whose heads have bounds; see `limited_protocol`."""

    max_head_bytes: ClassVar[int]
    head_timeout_s: ClassVar[float]
    cors_origins: ClassVar[frozenset[bytes]]

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._is_in_head = False
        self._num_head_bytes = 0  # of the present head, in the reads after its first one
        self._may_be_over = False  # the present head, its maximum
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal = (400, "the request is not HTTP/1")
        self._on_gone: Callable[[], object] | None = None
        self._answered: RequestResponseCycle | None = None  # the present one; others may wait
        self._response: DirectResponse | None = None  # its response; None for HEAD

    def take_body(self) -> bytes | None:
        """Return the body of the present request; None if some of it has to be waited for."""
        cycle = self._answered
        assert cycle is not None, "no request is being answered"
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = cycle.body, bytearray()
        return bytes(body)

    def when_gone(self, callback: Callable[[], object]) -> None:
        """Call `callback` if the client leaves during the present request, now if it has left."""
        if self.transport.is_closing():
            callback()
            return
        self._on_gone = callback
        self.flow.resume_reading()  # paused by a large body; the client's end is read too

    def write_now(self, body: bytes) -> bool:
        """Write bytes of the present response. False, without an effect, if that has to wait."""
        return self._response is not None and self._response.write_now(body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_idle_at(self.loop.time() + self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._on_gone is not None:
            self._on_gone()

    def data_received(self, data: bytes) -> None:
        was_in_head, idle_timer = self._is_in_head, self.timeout_keep_alive_task
        self._may_be_over = was_in_head or len(data) > self.max_head_bytes
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_in_head:
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and idle_timer is not None:  # empty lines, which begin no request
                self._close_idle_at(idle_timer.when())
            return
        if self._head_timer is None:
            self._start_head_timer()
        if was_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_head_bytes:
                self._refuse_now(431, f"the request's head is over {self.max_head_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        if self._may_be_over:
            num_bytes = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
            if num_bytes > self.max_head_bytes:
                self._refuse(431, f"the request's head is over {self.max_head_bytes} bytes")
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            self._refuse(400, f"the request is HTTP/{version}, not HTTP/1.1 or 1.0")
        num_hosts = [*map(_NAME, self.headers)].count(b"host")
        if num_hosts != 1 and version == "1.1":
            self._refuse(400, f"the request has {num_hosts} Host headers, not one")
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._on_gone = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that the parser or this class refuses, and close the connection."""
        status, message = self._refusal
        body = http_error_body(status, message)
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + self._cors_headers()
            + b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (new_id().encode(), len(body))
            + body
        )
        self.transport.close()

    def _cors_headers(self) -> bytes:
        """Return the headers by which a web page may read a refusal, if its origin has come."""
        origin = dict(self.headers or []).get(b"origin", b"")
        if not self.cors_origins & {b"*", origin}:
            return b""
        allowed = b"*" if b"*" in self.cors_origins else origin + b"\r\nvary: Origin"
        exposed = b"access-control-expose-headers: x-request-id\r\n"
        return b"access-control-allow-origin: " + allowed + b"\r\n" + exposed

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._answered = cycle
        self._response = None
        if cycle.scope["method"] != "HEAD":
            app = self._response = DirectResponse(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _refuse(self, status: int, message: str) -> NoReturn:
        """Have the parser's present call end with this answer."""
        self._refusal = (status, message)
        raise _RefusedError(message)

    def _refuse_now(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        self.send_400_response(message)

    def _close_idle_at(self, at_s: float) -> None:
        """Close the connection if no request has begun on it until a time of the loop."""
        self.timeout_keep_alive_task = self.loop.call_at(at_s, self.timeout_keep_alive_handler)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # of the client's next request, before the present answer ends
        elif not self.transport.is_closing():
            self._refuse_now(
                408, f"the request's head did not arrive within {self.head_timeout_s:g} s"
            )


def limited_protocol(config: FrontendConfig) -> type[LimitedProtocol]:
    """Return a protocol with the bounds of `config`; uvicorn makes the instances."""

    class Protocol(LimitedProtocol):
        max_head_bytes = config.max_head_bytes
        head_timeout_s = config.head_timeout_s
        cors_origins = frozenset(each.encode() for each in config.allowed_origins)

    return Protocol
