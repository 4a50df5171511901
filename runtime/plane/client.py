"""The calling side of the request plane: a pool of connections and the streams on them."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CancelledRequestError,
    ConnectionLostError,
    InternalError,
    OverloadedError,
    ProtocolError,
    TandemError,
    from_code,
)
from tandem.runtime.plane.connection import PlaneConnection, Progress
from tandem.runtime.plane.framing import (
    Batch,
    Cancel,
    Credit,
    Failure,
    Frame,
    Open,
    Stop,
)
from tandem.runtime.plane.handshake import ClientHandshake, Handshake
from tandem.runtime.tls import dialing_context

logger = logging.getLogger(__name__)

WINDOW_ITEMS = 256  # items of a stream that may be under way or unread


class ResponseStream:
    """The items of one call, in order, each once; belongs to one reader.

    Iteration ends when the handler returned. It raises the handler's error, ConnectionLostError
    when the peer died, stopped or closed, and CancelledRequestError or DeadlineError when the
    context ended. Leaving `async with` cancels a stream that is not over.
    """

    __slots__ = (
        "_connection", "_context", "_error", "_is_done", "_items", "_num_consumed",
        "_stop_listening", "_stream_id", "_waiter",
    )  # fmt: skip

    def __init__(self, connection: "ClientConnection", stream_id: int, context: RequestContext):
        self._connection = connection
        self._stream_id = stream_id
        self._context = context
        self._items: deque[bytes] = deque()
        self._num_consumed = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_done = False
        self._error: TandemError | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> bytes:
        if not self._items:
            await self._wait()
        item = self._items.popleft()
        self._consume(1)
        return item

    async def take(self) -> list[bytes]:
        """Wait for an item and return all that have arrived; end as iteration does."""
        if not self._items:
            await self._wait()
        return self.ready()

    async def _wait(self) -> None:
        while not self._items:
            if self._is_done:
                raise self._error or StopAsyncIteration
            if self._waiter is not None:
                raise InternalError("two readers on one response stream")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def ready(self) -> list[bytes]:
        """Return all items that have arrived, without waiting; empty when none has."""
        items = list(self._items)
        self._items.clear()
        if items:
            self._consume(len(items))
        return items

    def cancel(self) -> None:
        """Cancel the call; unread items are dropped. Idempotent."""
        self._cancel("the caller closed the stream")

    @property
    def is_done(self) -> bool:
        """True when nothing more will arrive; items may still be unread."""
        return self._is_done

    async def __aenter__(self) -> "ResponseStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def _listen(self) -> None:
        leave = self._context.on_cancel(self._on_context_end)
        leave_stop = self._context.on_stop(self._on_context_stop)

        def stop_listening() -> None:
            leave()
            leave_stop()

        self._stop_listening = stop_listening

    def _on_context_stop(self) -> None:
        if not self._is_done:
            self._connection.post(Stop(self._stream_id))

    def _on_context_end(self) -> None:
        error = self._context.error()
        self._cancel(error.message if error else "cancelled", error)

    def _cancel(self, reason: str, error: TandemError | None = None) -> None:
        if self._is_done:
            return
        self._connection.forget(self._stream_id)
        self._connection.post(Cancel(self._stream_id, reason))
        self._items.clear()
        self.finish(error or CancelledRequestError(f"request {self._context.id}: {reason}"))

    def _consume(self, num_items: int) -> None:
        self._num_consumed += num_items
        if self._num_consumed * 2 >= WINDOW_ITEMS and not self._is_done:
            self._connection.post(Credit(self._stream_id, self._num_consumed))
            self._num_consumed = 0

    def deliver(self, payload: bytes) -> None:
        """Take one more item from the connection."""
        self._items.append(payload)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def finish(self, error: TandemError | None) -> None:
        """End the stream, called by the connection; `error` is raised after the items."""
        if self._is_done:
            return
        self._is_done = True
        self._error = error
        self._stop_listening()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ClientConnection(PlaneConnection):
    """The client's end of the connection to one server."""

    def __init__(
        self, config: RuntimeConfig, instance_id: str, address: str, progress: Progress | None
    ) -> None:
        super().__init__(config, instance_id, progress)
        self._address = address
        self._streams: dict[int, ResponseStream] = {}
        self._num_opened = 0
        self.handshake: asyncio.Future[None] = self._loop.create_future()

    def handshake_over(self, send: Callable[[bytes], None]) -> Handshake:
        return ClientHandshake(self._config.cluster_token, self._address, send)

    def on_ready(self) -> None:
        if not self.handshake.done():
            self.handshake.set_result(None)

    def open(self, endpoint: str, payload: bytes, context: RequestContext) -> ResponseStream:
        """Start a stream. Raise ConnectionLostError when the connection is over already."""
        if self._error is not None:
            raise ConnectionLostError(f"lost {self._address}: {self._error.message}")
        if len(payload) > self.peer_max_payload_bytes:
            limit = self.peer_max_payload_bytes
            raise ProtocolError(
                f"{len(payload)} bytes exceed the payload limit {limit} of {self._address}"
            )
        self._num_opened += 1
        stream = ResponseStream(self, self._num_opened, context)
        self._streams[self._num_opened] = stream
        remaining_s = context.remaining_s()
        deadline_ms = None if remaining_s == math.inf else math.ceil(remaining_s * 1e3)
        frame = Open(
            stream_id=self._num_opened,
            endpoint=endpoint,
            payload=payload,
            credit=WINDOW_ITEMS,
            request_id=context.id,
            deadline_ms=deadline_ms,
            headers=context.headers,
        )
        self.post(frame)
        stream._listen()
        return stream

    def forget(self, stream_id: int) -> None:
        """Drop later items of a stream."""
        self._streams.pop(stream_id, None)

    def on_frame(self, frame: Frame) -> None:
        if type(frame) is not Batch:
            raise ProtocolError(f"a server may not send {type(frame).__name__}")
        streams = self._streams
        for stream_id, payload in frame.items:
            stream = streams.get(stream_id)
            if stream is not None:
                stream.deliver(payload)
        for stream_id in frame.ends:
            stream = streams.pop(stream_id, None)
            if stream is not None:
                stream.finish(None)
        for failure in frame.fails:
            stream = streams.pop(failure.stream_id, None)
            if stream is not None:
                stream.finish(_as_error(failure))

    def on_lost(self, error: TandemError) -> None:
        if not self.handshake.done():
            self.handshake.set_exception(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.finish(ConnectionLostError(f"lost {self._address}: {error.message}"))
        if streams:
            logger.warning("lost %s with %d streams: %s", self._address, len(streams), error)


def _as_error(failure: Failure) -> TandemError:
    error = from_code(failure.code, failure.message, failure.param)
    if isinstance(error, OverloadedError):
        error.retry_after_s = failure.retry_after_s
    return error


class RequestClient:
    """Opens streams to any address over one connection each; dials a lost one again."""

    def __init__(
        self, config: RuntimeConfig, instance_id: str, *, progress: Progress | None = None
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self._progress = progress
        self._tls = dialing_context(config)
        self._dials: dict[str, asyncio.Task[ClientConnection]] = {}

    async def open(
        self, address: str, endpoint: str, payload: bytes, context: RequestContext
    ) -> ResponseStream:
        """Start a stream on `address` ("host:port").

        Raise ConnectionLostError without an answer within `connect_timeout_s`, ProtocolError when
        the peer is not of this cluster or takes no payload of this size, and the context's own
        error.
        """
        context.raise_if_done()
        connection = await self._connection(address)
        context.raise_if_done()
        return connection.open(endpoint, payload, context)

    async def call(
        self, address: str, endpoint: str, payload: bytes, context: RequestContext
    ) -> bytes:
        """Return the single item of the answer. Raise ProtocolError on none or several."""
        async with await self.open(address, endpoint, payload, context) as stream:
            items = [item async for item in stream]
        if len(items) != 1:
            raise ProtocolError(f"{endpoint} at {address} answered {len(items)} items instead of 1")
        return items[0]

    async def close(self) -> None:
        """Close all connections; their streams raise ConnectionLostError."""
        dials, self._dials = self._dials, {}
        for dial in dials.values():
            dial.cancel()
        outcomes = await asyncio.gather(*dials.values(), return_exceptions=True)
        connections = [outcome for outcome in outcomes if isinstance(outcome, ClientConnection)]
        for connection in connections:
            connection.close(ConnectionLostError("this process closed the connection"))
        await asyncio.gather(*(connection.wait_closed() for connection in connections))

    async def _connection(self, address: str) -> ClientConnection:
        dial = self._dials.get(address)
        if dial is None or _is_over(dial):
            self._dials = {a: d for a, d in self._dials.items() if not _is_over(d)}
            dial = self._dials[address] = asyncio.create_task(self._dial(address))
            dial.add_done_callback(_is_over)  # retrieves the error, in case every caller has left
        return await asyncio.shield(dial)

    async def _dial(self, address: str) -> ClientConnection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        connection = ClientConnection(self._config, self._instance_id, address, self._progress)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await loop.create_connection(
                    lambda: connection, host.strip("[]"), int(port), ssl=self._tls
                )
                await connection.handshake
        except (OSError, ValueError, TimeoutError) as error:
            lost = ConnectionLostError(
                f"cannot connect to {address}: {str(error) or 'no answer in time'}"
            )
            connection.abort(lost)
            raise lost from error
        except BaseException:
            connection.abort(ConnectionLostError("the dial was cancelled"))
            raise
        finally:
            if connection.handshake.done() and not connection.handshake.cancelled():
                connection.handshake.exception()  # retrieved: it was raised above, or replaced
        return connection


def _is_over(dial: asyncio.Task[ClientConnection]) -> bool:
    if not dial.done():
        return False
    return dial.cancelled() or dial.exception() is not None or dial.result().is_lost
