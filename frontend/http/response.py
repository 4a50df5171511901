"""The writing of one response, in uvicorn's place: 11 us less per request, and one packet less.

The head goes out with the first bytes of the body, or an empty part of it. Without a length a body
has chunks; a client of HTTP/1.0 does not know chunks, and gets one that ends with the connection.
"""

from collections.abc import Awaitable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

_WITHOUT_BODY = (204, 304)  # statuses
_CONTROLS = bytes([*range(9), *range(10, 32), 127])  # that no header has: all but the tab
_WRONG_CHARACTER = "a header of the response has a character that none may have"
_checked_names: set[bytes] = set()  # of headers; none comes from a client


class DirectResponse:
    """The application for one request, with its response written by this class.

    The state of the response stays in uvicorn's cycle. Not for HEAD.
    """

    __slots__ = ("_app", "_cycle", "_has_chunks", "_head", "_num_left")

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._head = b""  # until it is written
        self._num_left: int | None = None  # bytes of the body to come; None: not known
        self._has_chunks = False

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        assert not cycle.response_complete, "a message after the end of the response"
        if not cycle.response_started:
            self._begin(message["status"], message.get("headers", ()))
            return
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._num_left is not None:
            self._num_left -= len(body)
            assert (self._num_left == 0) if is_last else (self._num_left >= 0), "wrong length"
        elif self._has_chunks:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if is_last:
                body += b"0\r\n\r\n"
        if self._head:
            body, self._head = self._head + body, b""
        if body:
            cycle.transport.write(body)
        if is_last:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()

    def write_now(self, body: bytes) -> bool:
        """Write bytes of a body with more to come. False, without an effect, if that has to wait.

        It is all that an event of a stream costs here: no turn of a task, no message.
        """
        cycle = self._cycle
        if cycle.disconnected:
            return True
        if cycle.flow.write_paused or self._head or not self._has_chunks:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        headers = [*cycle.default_headers, *headers]
        given = dict(headers)
        if not _checked_names.issuperset(given):
            _check_names(given)
        values = b"".join([value for _, value in headers])
        if len(values.translate(None, _CONTROLS)) < len(values):
            raise RuntimeError(_WRONG_CHARACTER)
        if b"content-length" in given:
            self._num_left = int(given[b"content-length"])
        elif status not in _WITHOUT_BODY and cycle.scope["http_version"] != "1.0":
            self._has_chunks = True
            headers.append((b"transfer-encoding", b"chunked"))
        if given.get(b"connection") == b"close":
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        self._head = STATUS_LINE[status] + b"\r\n".join(map(b": ".join, headers)) + b"\r\n\r\n"


def _check_names(names: Iterable[bytes]) -> None:
    if HEADER_RE.search(b"".join(names)):
        raise RuntimeError(_WRONG_CHARACTER)
    _checked_names.update(names)
