"""The calling side of the request plane: a pool of connections and the streams on them."""

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    ConnectionLostError,
    OverloadedError,
    ProtocolError,
    TandemError,
    from_code,
)
from tandem.runtime.listeners import Listeners
from tandem.runtime.plane.connection import PlaneConnection, Progress
from tandem.runtime.plane.framing import Batch, Failure, Frame, Open
from tandem.runtime.plane.handshake import ClientHandshake, Handshake
from tandem.runtime.plane.response_stream import WINDOW_ITEMS, ResponseStream
from tandem.runtime.tls import client_context
from tandem.runtime.wire.bounds import MAX_COUNT

logger = logging.getLogger(__name__)


class ClientConnection(PlaneConnection):
    """The client's end of the connection to one server."""

    def __init__(
        self, config: RuntimeConfig, instance_id: str, address: str, progress: Progress | None
    ) -> None:
        super().__init__(config, instance_id, progress)
        self._address = address
        self._streams: dict[int, ResponseStream] = {}
        self._num_opened = 0
        # Asyncio's own way to the loop asks the system for the process's id each time.
        self.new_future: Callable[[], asyncio.Future[bool]] = self._loop.create_future
        self.handshake = self.new_future()
        self.to_pass_on: list[ResponseStream] = []  # streams with items of the present read
        self._when_lost: Callable[[], None] = lambda: None

    def handshake_over(self, send: Callable[[bytes], None]) -> Handshake:
        return ClientHandshake(self._config.cluster_token, self._address, send)

    def on_ready(self) -> None:
        if not self.handshake.done():
            self.handshake.set_result(True)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the connection is over, now if it is."""
        if self.is_lost:
            callback()
        else:
            self._when_lost = callback

    def open(
        self,
        endpoint: str,
        payload: bytes,
        context: RequestContext,
        headers: dict[str, str] | None = None,
    ) -> ResponseStream:
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
        remaining_ms = min(remaining_s * 1e3, MAX_COUNT)
        deadline_ms = None if remaining_s == math.inf else math.ceil(remaining_ms)
        frame = Open(
            stream_id=self._num_opened,
            endpoint=endpoint,
            payload=payload,
            credit=WINDOW_ITEMS,
            request_id=context.id,
            deadline_ms=deadline_ms,
            headers=context.headers if headers is None else headers,
        )
        self.post(frame)
        stream.listen()
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

    def on_read(self) -> None:
        streams, self.to_pass_on = self.to_pass_on, []
        for stream in streams:
            stream.pass_on_now()

    def on_lost(self, error: TandemError) -> None:
        if not self.handshake.done():
            self.handshake.set_exception(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.finish(ConnectionLostError(f"lost {self._address}: {error.message}"))
        if streams:
            logger.warning("lost %s with %d streams: %s", self._address, len(streams), error)
        self._when_lost()


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
        # authorities alone are for NATS and etcd
        self._tls = client_context(config) if config.tls_cert_file is not None else None
        self._dials: dict[str, asyncio.Task[ClientConnection]] = {}
        self._connected: dict[str, ClientConnection] = {}  # by address, until they are lost
        self._losses: Listeners[[str]] = Listeners()

    def on_loss(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with each address whose connection is lost, or that answers no dial.

        It is called before the streams of the connection fail. Return the function that ends this.
        """
        return self._losses.add(listener)

    def is_quiet(self, address: str) -> bool:
        """Return True when a heartbeat of this peer is late: its connection may be lost soon."""
        dial = self._dials.get(address)
        if dial is None or not dial.done() or _is_over(dial):
            return False
        return dial.result().liveness.is_quiet(asyncio.get_running_loop().time())

    async def open(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: RequestContext,
        headers: dict[str, str] | None = None,
    ) -> ResponseStream:
        """Start a stream on `address` ("host:port"); `headers` replace those of the context.

        Raise ConnectionLostError without an answer within `connect_timeout_s`, ProtocolError when
        the peer is not of this cluster or takes no payload of this size, and the context's own
        error.
        """
        connection = self._connected.get(address)
        if connection is None:
            connection = await self.reach(address, context)
        else:
            context.raise_if_done()
        return connection.open(endpoint, payload, context, headers)

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
        self._losses.clear()
        dials, self._dials = self._dials, {}
        for dial in dials.values():
            dial.cancel()
        outcomes = await asyncio.gather(*dials.values(), return_exceptions=True)
        connections = [outcome for outcome in outcomes if isinstance(outcome, ClientConnection)]
        for connection in connections:
            connection.close(ConnectionLostError("this process closed the connection"))
        await asyncio.gather(*(connection.wait_closed() for connection in connections))

    async def reach(self, address: str, context: RequestContext) -> ClientConnection:
        """Return the connection to `address`, a new one if need be. Raise as `open` does."""
        context.raise_if_done()
        dial = self._dials.get(address)
        if dial is None or _is_over(dial):
            self._dials = {a: d for a, d in self._dials.items() if not _is_over(d)}
            dial = self._dials[address] = asyncio.create_task(self._dial(address))
            dial.add_done_callback(partial(self._on_dialed, address))
        if not dial.done():
            ended = asyncio.ensure_future(context.cancelled())
            try:
                await asyncio.wait((dial, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
            context.raise_if_done()
        return dial.result()

    def _on_dialed(self, address: str, dial: asyncio.Task[ClientConnection]) -> None:
        error = None if dial.cancelled() else dial.exception()  # retrieved: callers may have left
        if isinstance(error, ConnectionLostError):
            self._losses.tell(address)
        elif error is None and not dial.cancelled():
            self._connected[address] = dial.result()
            dial.result().when_lost(partial(self._on_lost, address))

    def _on_lost(self, address: str) -> None:
        self._connected.pop(address, None)
        self._losses.tell(address)

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
