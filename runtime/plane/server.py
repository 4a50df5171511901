"""The serving side of the request plane: endpoints, handlers and streams."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from tandem.runtime.address import host_port, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    ConnectionLostError,
    IncompleteError,
    InternalError,
    OverloadedError,
    ProtocolError,
    ServiceError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.plane.connection import PlaneConnection, Progress
from tandem.runtime.plane.framing import (
    MAX_PAYLOAD_BYTES,
    VERSION,
    Cancel,
    Credit,
    Failure,
    Frame,
    Open,
    Preamble,
    Status,
    Stop,
)

logger = logging.getLogger(__name__)

STOP_PATIENCE_S = 2.0  # for cancelled handlers to end


class Responder:
    """The server's end of one stream."""

    __slots__ = ("_backlog", "_connection", "_context", "_credit", "_stream_id", "_woken")

    def __init__(
        self, connection: "ServerConnection", stream_id: int, credit: int, context: RequestContext
    ) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._credit = credit
        self._context = context
        self._backlog: deque[bytes] = deque()  # sent beyond the credit, in order
        self._woken: asyncio.Event | None = None
        context.on_cancel(self._on_context_end)

    def send(self, payload: bytes) -> None:
        """Send one item without waiting; dropped when the caller is gone.

        The items of one loop tick leave a connection as one frame. Items beyond the peer's credit
        wait in memory: a handler of unbounded output calls `drain`. Raise ProtocolError when the
        payload is too large for a frame.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"{len(payload)} bytes exceed the payload limit {MAX_PAYLOAD_BYTES}"
            )
        if self._credit > 0:
            self._credit -= 1
            self._connection.post_item(self._stream_id, payload)
        else:
            self._backlog.append(payload)

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
            self._context.raise_if_done()
            self._woken = self._woken or asyncio.Event()
            self._woken.clear()
            await self._woken.wait()
        await self._connection.drain()
        self._context.raise_if_done()

    async def finish(self) -> None:
        """Wait until every item has been handed to the connection."""
        while self._backlog:
            await self.drain()

    def grant(self, num_items: int) -> None:
        """Add the credit of items that the peer consumed."""
        self._credit += num_items
        while self._backlog and self._credit > 0:
            self._credit -= 1
            self._connection.post_item(self._stream_id, self._backlog.popleft())
        self._wake()

    def _on_context_end(self) -> None:
        self._backlog.clear()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()


Handler = Callable[[bytes, RequestContext, Responder], Awaitable[None]]


class _Call:
    """A stream whose handler is running."""

    __slots__ = ("context", "responder", "task")

    def __init__(self, context: RequestContext, responder: Responder) -> None:
        self.context = context
        self.responder = responder
        self.task: asyncio.Task[None] | None = None


class ServerConnection(PlaneConnection):
    """The server's end of the connection from one client."""

    side = "server"
    peer_side = "client"

    def __init__(self, server: "RequestServer", config: RuntimeConfig, instance_id: str) -> None:
        super().__init__(config, instance_id, server.progress)
        self._server = server
        self._calls: dict[int, _Call] = {}

    def check_greeting(self, preamble: Preamble) -> None:
        if preamble.version != VERSION:
            self.greet(Status.WRONG_VERSION)
            raise ProtocolError(f"request-plane version {preamble.version}, not {VERSION}")
        if not self.has_token(preamble):
            self.greet(Status.WRONG_TOKEN)
            raise ProtocolError("wrong cluster token")
        self.greet(Status.OK)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)

    def on_frame(self, frame: Frame) -> None:
        if type(frame) is Open:
            self._open(frame)
        elif type(frame) is Credit:
            call = self._calls.get(frame.stream_id)
            if call is not None:
                call.responder.grant(frame.num_items)
        elif type(frame) is Cancel:
            call = self._calls.get(frame.stream_id)
            if call is not None:
                call.context.cancel(frame.reason)
        elif type(frame) is Stop:
            call = self._calls.get(frame.stream_id)
            if call is not None:
                call.context.stop()
        else:
            raise ProtocolError(f"a client may not send {type(frame).__name__}")

    def on_lost(self, error: TandemError) -> None:
        self._server.connections.discard(self)
        if self._calls:
            logger.warning("lost %s with %d streams: %s", self.peer, len(self._calls), error)
        for call in list(self._calls.values()):
            call.context.cancel(f"the caller is gone: {error.message}")

    def _open(self, frame: Open) -> None:
        if frame.stream_id in self._calls:
            raise ProtocolError(f"stream {frame.stream_id} was opened twice")
        try:
            handler = self._server.admit(frame.endpoint)
        except TandemError as error:
            self.post_failure(_as_failure(frame.stream_id, error))
            return
        timeout_s = None if frame.deadline_ms is None else frame.deadline_ms / 1e3
        context = RequestContext(frame.request_id, timeout_s=timeout_s, headers=frame.headers)
        call = _Call(context, Responder(self, frame.stream_id, frame.credit, context))
        self._calls[frame.stream_id] = call
        call.task = self._loop.create_task(self._run(frame, handler, call))
        self._server.track(call.task)

    async def _run(self, frame: Open, handler: Handler, call: _Call) -> None:
        try:
            await handler(frame.payload, call.context, call.responder)
            await call.responder.finish()
            call.context.raise_if_done()
            self.post_end(frame.stream_id)
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
    retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
    return Failure(stream_id, error.code, error.message, error.param, retry_after_s)


class RequestServer:
    """Serves named endpoints to any client of the cluster.

    `progress` returns (engine steps done, busy) for the heartbeats; None is never busy.
    """

    def __init__(
        self, config: RuntimeConfig, instance_id: str, *, progress: Progress | None = None
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self.progress = progress
        self.connections: set[ServerConnection] = set()
        self._handlers: dict[str, Handler] = {}
        self.running: set[asyncio.Task[None]] = set()  # of handlers
        self._server: asyncio.Server | None = None
        self._is_stopping = False
        self.address = ""

    def register(self, endpoint: str, handler: Handler) -> None:
        """Serve `endpoint` by `handler`: a return ends the stream, an error fails it.

        A stream whose context ended fails with the context's error in any case.
        """
        self._handlers[endpoint] = handler

    def unregister(self, endpoint: str) -> None:
        """Refuse new streams of `endpoint` with UnavailableError; running ones go on."""
        self._handlers.pop(endpoint, None)

    async def start(self, port: int = 0) -> None:
        """Listen and set `address`. Raise ServiceError when the port is taken."""
        loop = asyncio.get_running_loop()
        host = self._config.host
        try:
            self._server = await loop.create_server(
                lambda: ServerConnection(self, self._config, self._instance_id), host, port
            )
        except OSError as error:
            raise ServiceError(f"cannot listen on {host}:{port}: {error}") from error
        bound_port = self._server.sockets[0].getsockname()[1]
        host = self._config.advertise_host or host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        self.address = host_port(host, bound_port)
        logger.info("request plane of %s listens on %s", self._instance_id, self.address)

    def admit(self, endpoint: str) -> Handler:
        """Return the endpoint's handler. Raise UnavailableError without one, or after `stop`."""
        if self._is_stopping:
            raise UnavailableError(f"{self._instance_id} is stopping")
        handler = self._handlers.get(endpoint)
        if handler is None:
            # Perhaps not yet: a new worker at the address of a dead one may be starting.
            raise UnavailableError(f"{self._instance_id} has no endpoint {endpoint!r}")
        return handler

    def track(self, task: "asyncio.Task[None]") -> None:
        """Keep a handler's task in `running` until it is done."""
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def stop(self) -> None:
        """Stop listening, cancel running handlers, close all connections.

        A handler that does not end within `STOP_PATIENCE_S` is abandoned; the closed connection
        ends its stream.
        """
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=STOP_PATIENCE_S)
            if stuck:
                logger.warning("%d handlers did not end when they were cancelled", len(stuck))
        connections = list(self.connections)
        for connection in connections:
            connection.close(ConnectionLostError("the server stopped"))
        await asyncio.gather(*(connection.wait_closed() for connection in connections))
