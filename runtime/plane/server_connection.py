"""The server's end of a connection on the request plane: streams, their answers and limits."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    IncompleteError,
    InternalError,
    OverloadedError,
    ProtocolError,
    TandemError,
)
from tandem.runtime.plane.connection import PlaneConnection
from tandem.runtime.plane.framing import (
    MAX_PAYLOAD_BYTES,
    Cancel,
    Credit,
    Failure,
    Frame,
    Open,
    Stop,
)
from tandem.runtime.plane.handshake import Handshake, ServerHandshake
from tandem.runtime.process.logs import log_for
from tandem.runtime.wire.bounds import MAX_NAME, MAX_SECONDS, MAX_TEXT

if TYPE_CHECKING:
    from tandem.runtime.plane.server import RequestServer

logger = logging.getLogger(__name__)

MAX_STREAMS = 4096  # of one connection
MAX_BACKLOG_BYTES = 32 * 1024 * 1024  # of one connection: items beyond the credit of their streams
MAX_UNSENT_BYTES = 16 * 1024 * 1024  # of one connection: a peer with more is not read from


class Responder:
    """The server's end of one stream."""

    __slots__ = (
        "_backlog", "_connection", "_credit", "_is_held", "_stream_id", "_woken", "context",
        "has_ended",
    )  # fmt: skip

    def __init__(
        self, connection: "ServerConnection", stream_id: int, credit: int, context: RequestContext
    ) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._credit = credit
        self.context = context
        self._backlog: deque[bytes] = deque()  # sent beyond the credit, in order
        self._woken: asyncio.Event | None = None
        self._is_held = False  # was without credit once: the end of the context has an effect
        self.has_ended = False

    def shares_connection(self, other: "Responder") -> bool:
        """Return True if the stream `other` came on the same connection."""
        return self._connection is other._connection

    def send(self, payload: bytes) -> None:
        """Send one item without waiting; dropped when the caller is gone.

        The items of one loop tick leave a connection as one frame. Items beyond the peer's credit
        wait in memory, and beyond `MAX_BACKLOG_BYTES` of the connection they end the request: a
        handler of unbounded output calls `drain`. Raise ProtocolError when the payload is too large
        for a frame.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"{len(payload)} bytes exceed the payload limit {MAX_PAYLOAD_BYTES}"
            )
        if self._credit > 0:
            self._credit -= 1
            self._connection.post_item(self._stream_id, payload)
        elif self._connection.num_backlog_bytes + len(payload) <= MAX_BACKLOG_BYTES:
            self._connection.num_backlog_bytes += len(payload)
            self._backlog.append(payload)
            self._hold()
        else:
            # Later: the handler may be in the midst of its own bookkeeping.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.context.cancel, "the caller left too much unread")

    def end(self) -> None:
        """End the stream after its last item, in one frame with it where the peer has room.

        Without this call it ends when the handler returns, in a later frame.
        """
        if not self._backlog and not self.has_ended:
            self.has_ended = True
            self._connection.post_end(self._stream_id)

    @property
    def has_room(self) -> bool:
        """True while the peer and the socket take another item."""
        return self._credit > 0 and self._connection.is_writable

    @property
    def num_flushes(self) -> int:
        """The number of writes to the socket; grows when the loop turns."""
        return self._connection.num_flushes

    async def drain(self) -> None:
        """Wait until all items are sent and the peer takes more; raise the context's error."""
        while self._credit <= 0:
            self.context.raise_if_done()
            self._hold()
            self._woken = self._woken or asyncio.Event()
            self._woken.clear()
            await self._woken.wait()
        await self._connection.drain()
        self.context.raise_if_done()

    async def finish(self) -> None:
        """Wait until every item has been handed to the connection."""
        while self._backlog:
            await self.drain()

    def grant(self, num_items: int) -> None:
        """Add the credit of items that the peer consumed."""
        self._credit += num_items
        while self._backlog and self._credit > 0:
            self._credit -= 1
            payload = self._backlog.popleft()
            self._connection.num_backlog_bytes -= len(payload)
            self._connection.post_item(self._stream_id, payload)
        self._wake()

    def _hold(self) -> None:
        if not self._is_held:
            self._is_held = True
            self.context.on_cancel(self._on_context_end)

    def _on_context_end(self) -> None:
        self._connection.num_backlog_bytes -= sum(map(len, self._backlog))
        self._backlog.clear()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()


Handler = Callable[[bytes, RequestContext, Responder], Awaitable[None]]


class ServerConnection(PlaneConnection):
    """The server's end of the connection from one client."""

    def __init__(self, server: "RequestServer", config: RuntimeConfig, instance_id: str) -> None:
        super().__init__(config, instance_id, server.progress, server.max_frame_bytes)
        self._server = server
        self._calls: dict[int, Responder] = {}  # whose handlers are running
        self._turn = asyncio.Lock()  # of calls that begin while the socket is full
        self.num_backlog_bytes = 0

    def handshake_over(self, send: Callable[[bytes], None]) -> Handshake:
        return ServerHandshake(self._config.cluster_token, self._server.address, send)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)

    def hold_unfinished(self, num_bytes: int) -> None:
        self._server.num_unfinished_bytes += num_bytes - self.num_unfinished_bytes
        super().hold_unfinished(num_bytes)
        self._server.shed()

    def fault_of_peer(self, now: float) -> str:
        """Read nothing more from a peer that does not read; give it up when that lasts."""
        transport, liveness = self._transport, self.liveness
        num_unsent = transport.get_write_buffer_size() if transport is not None else 0
        if transport is not None and num_unsent > MAX_UNSENT_BYTES and not liveness.is_unread:
            liveness.unread(now)
            transport.pause_reading()
        return super().fault_of_peer(now)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.liveness.is_unread and self._transport is not None:
            self.liveness.read_again()
            self._transport.resume_reading()

    def on_frame(self, frame: Frame) -> None:
        if isinstance(frame, Open):
            self._open(frame)
            return
        if not isinstance(frame, Credit | Cancel | Stop):
            raise ProtocolError(f"a client may not send {type(frame).__name__}")
        call = self._calls.get(frame.stream_id)
        if call is None:
            return
        if isinstance(frame, Credit):
            call.grant(frame.num_items)
        elif isinstance(frame, Cancel):
            call.context.cancel(frame.reason)
        else:
            call.context.stop()

    def on_lost(self, error: TandemError) -> None:
        self._server.connections.discard(self)
        self.hold_unfinished(0)
        if self._calls:
            logger.warning("lost %s with %d streams: %s", self.peer, len(self._calls), error)
        for call in list(self._calls.values()):
            call.context.cancel(f"the caller is gone: {error.message}")

    def _open(self, frame: Open) -> None:
        if frame.stream_id in self._calls:
            raise ProtocolError(f"stream {frame.stream_id} was opened twice")
        try:
            if len(self._calls) >= MAX_STREAMS:
                raise OverloadedError(f"{MAX_STREAMS} streams of this connection are open")
            handler = self._server.admit(frame.endpoint)
        except TandemError as error:
            self.post_failure(_as_failure(frame.stream_id, error))
            return
        timeout_s = None if frame.deadline_ms is None else frame.deadline_ms / 1e3
        context = RequestContext(frame.request_id, timeout_s=timeout_s, headers=frame.headers)
        call = self._calls[frame.stream_id] = Responder(
            self, frame.stream_id, frame.credit, context
        )
        task = self._loop.create_task(self._run(frame, handler, call))
        self._server.running.add(task)
        task.add_done_callback(self._server.running.discard)

    async def _wait_for_turn(self, context: RequestContext) -> None:
        """Wait until the socket takes an answer, one call after the other."""
        async with self._turn:
            self._flush()
            await self.drain()
        context.raise_if_done()

    async def _run(self, frame: Open, handler: Handler, call: Responder) -> None:
        log_for(call.context.id, call.context.headers)
        try:
            if self.may_be_full:
                await self._wait_for_turn(call.context)
            await handler(frame.payload, call.context, call)
            await call.finish()
            call.context.raise_if_done()
            call.end()
        except TandemError as error:
            self.post_failure(_as_failure(frame.stream_id, error))
        except asyncio.CancelledError:
            stopped = IncompleteError("the server stopped")
            self.post_failure(_as_failure(frame.stream_id, stopped))
            raise
        except Exception:
            error_id = new_id()
            logger.exception(
                "request %s on %s: error %s", call.context.id, frame.endpoint, error_id
            )
            internal = InternalError(f"internal error {error_id}")
            self.post_failure(_as_failure(frame.stream_id, internal))
        finally:
            self._calls.pop(frame.stream_id, None)
            call.context.close()


def _as_failure(stream_id: int, error: TandemError) -> Failure:
    given_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
    retry_after_s = min(max(given_s, 0.0), MAX_SECONDS)
    message, param = error.message[:MAX_TEXT], error.param and error.param[:MAX_NAME]
    return Failure(stream_id, error.code, message, param, retry_after_s)
