"""One connection of the request plane: handshake, frames, heartbeats. Both sides share it."""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from tandem.runtime.address import host_port
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConnectionLostError, ProtocolError, TandemError
from tandem.runtime.plane.framing import (
    FIELDS_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    Batch,
    Failure,
    Frame,
    FrameReader,
    Heartbeat,
    Hello,
    encode_frame,
)
from tandem.runtime.plane.handshake import Handshake
from tandem.runtime.plane.liveness import Liveness
from tandem.runtime.printable import short
from tandem.runtime.tasks import ends_within

logger = logging.getLogger(__name__)

Progress = Callable[[], tuple[int, bool]]  # (steps done, busy)

_MAX_BATCH_BYTES = MAX_FRAME_BYTES // 16  # keeps a batch with its frame under the limit
_FLUSH_BYTES = 64 * 1024  # of one loop tick, after which fullness is asked of the socket


class PlaneConnection(asyncio.Protocol, ABC):
    """One connection to a peer, as a protocol of the event loop.

    Subclasses greet, handle frames, and handle the end: `on_lost` runs exactly once, with the
    reason.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        instance_id: str,
        progress: Progress | None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self._progress = progress
        self._max_frame_bytes = max_frame_bytes  # that the peer may send
        self.peer_max_payload_bytes = MAX_PAYLOAD_BYTES  # that the peer takes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None  # while the connection opens
        self._reader: FrameReader | None = None  # after the handshake
        self._sequence_number = 0
        self._error: TandemError | None = None
        self._frames: list[Frame] = []
        self._items: list[tuple[int, bytes]] = []
        self._items_bytes = 0
        self._ends: list[int] = []
        self._fails: list[Failure] = []
        self._flush_scheduled = False
        self.num_flushes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle | None = None
        self.liveness = Liveness(config, self._loop.time())
        self._closed = asyncio.Event()
        self.num_unfinished_bytes = 0
        self.peer = "?"  # address, then instance id and address

    # ---- for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Handle any frame but Hello and Heartbeat."""

    def on_read(self) -> None:
        """Handle the end of a read, after its frames."""

    def on_ready(self) -> None:
        """Handle the end of the handshake."""

    def hold_unfinished(self, num_bytes: int) -> None:
        """Note the bytes held of a frame whose end has not arrived."""
        self.num_unfinished_bytes = num_bytes

    @abstractmethod
    def on_lost(self, error: TandemError) -> None:
        """Handle the end of the connection."""

    @abstractmethod
    def handshake_over(self, send: Callable[[bytes], None]) -> Handshake:
        """Return this side of a new handshake."""

    # ---- sending ------------------------------------------------------------------------------

    def post(self, frame: Frame) -> None:
        """Send a frame at the end of this loop tick."""
        self._frames.append(frame)
        self._schedule_flush()

    def post_item(self, stream_id: int, payload: bytes) -> None:
        """Send an item with all others of this loop tick, in one frame."""
        self._items_bytes += len(payload)
        if self._items_bytes > _MAX_BATCH_BYTES:
            self._pack_batch()
            self._items_bytes = len(payload)
        self._items.append((stream_id, payload))
        if not self._flush_scheduled:
            self._schedule_flush()

    def post_end(self, stream_id: int) -> None:
        """End a stream, after the items posted before."""
        self._ends.append(stream_id)
        self._schedule_flush()

    def post_failure(self, failure: Failure) -> None:
        """Fail a stream, after the items posted before."""
        self._fails.append(failure)
        self._schedule_flush()

    @property
    def is_writable(self) -> bool:
        """True while the socket takes more."""
        return self._writable.is_set()

    @property
    def may_be_full(self) -> bool:
        """True unless the socket takes more than the little that was posted in this loop tick."""
        return self._items_bytes > _FLUSH_BYTES or not self._writable.is_set()

    async def drain(self) -> None:
        """Wait until the socket takes more; returns at once when the connection is over."""
        await self._writable.wait()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _pack_batch(self) -> None:
        if self._items or self._ends or self._fails:
            self._frames.append(Batch(self._items, self._ends, self._fails))
            self._items, self._ends, self._fails = [], [], []
            self._items_bytes = 0

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.num_flushes += 1
        self._pack_batch()
        frames, self._frames = self._frames, []
        if self._transport is None or self._error is not None:
            return
        for frame in frames:
            self._transport.write(encode_frame(self._sequence_number, frame))
            self._sequence_number += 1

    # ---- receiving ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connected: Any = self._transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = self._transport.get_extra_info("peername")[:2]
        self.peer = host_port(host, port)
        self._timer = self._loop.call_later(self._config.connect_timeout_s, self._greeting_late)
        self._handshake = self.handshake_over(self._transport.write)
        self._handshake.begin()

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self.liveness.heard(self._loop.time())
        try:
            if self._reader is None:
                data = self._read_greeting(data)
            reader = self._reader
            if reader is not None and data:
                for frame in reader.feed(data):
                    self._on_any_frame(frame)
                self.on_read()
                if reader.unfinished or self.num_unfinished_bytes:
                    self.hold_unfinished(0 if self._error else len(reader.unfinished))
        except ProtocolError as error:
            reason = ProtocolError(error.message)  # without the bytes that the traceback holds
            logger.warning("closing the connection with %s: %s", self.peer, reason)
            if self._reader is None:
                self.close(reason)  # sends the refusal
            else:
                self.abort(reason)

    def _read_greeting(self, data: bytes) -> bytes:
        assert self._handshake is not None
        rest = self._handshake.feed(data)
        if rest is None:
            return b""
        self._handshake = None
        self._reader = FrameReader(self._max_frame_bytes)
        self._frames.insert(0, Hello(self._instance_id, self._max_frame_bytes))
        self._flush()
        self._start_heartbeats()
        self.on_ready()
        return rest

    def _on_any_frame(self, frame: Frame) -> None:
        if self._error is not None:
            return
        if type(frame) is Heartbeat:
            self.liveness.progressed(frame, self._loop.time())
        elif type(frame) is Hello:
            self.peer = f"{short(frame.instance_id)} at {self.peer}"
            self.peer_max_payload_bytes = frame.max_frame_bytes - FIELDS_BYTES
        else:
            self.on_frame(frame)

    # ---- liveness -----------------------------------------------------------------------------

    def _greeting_late(self) -> None:
        self.abort(ConnectionLostError(f"{self.peer} did not answer the handshake"))

    def _start_heartbeats(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        self.liveness = Liveness(self._config, now)
        self._next_beat_s = now
        self._tick()

    def fault_of_peer(self, now: float) -> str:
        """Return the reason to give the peer up; empty while there is none."""
        return self.liveness.fault(now)

    def _tick(self) -> None:
        """Send a heartbeat when due, and give up a peer that is silent or makes no progress."""
        now, tick_s = self._loop.time(), self.liveness.tick_s
        if fault := self.fault_of_peer(now):
            self.abort(ConnectionLostError(f"{self.peer} {fault}"))
            return
        if now >= self._next_beat_s - tick_s / 2:
            self._next_beat_s = now + self._config.heartbeat_interval_s
            self.post(Heartbeat(*(self._progress() if self._progress else (0, False))))
        self._timer = self._loop.call_later(tick_s, self._tick)

    # ---- the end ------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """True once the connection is over."""
        return self._error is not None

    def abort(self, error: TandemError) -> None:
        """Close at once, for this reason; unsent data is dropped."""
        self._lose(error)
        if self._transport is not None:
            self._transport.abort()

    def close(self, error: TandemError) -> None:
        """Close after sending the posted frames."""
        self._flush()
        self._lose(error)
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        cause = f": {exc}" if exc is not None else ""
        self._lose(ConnectionLostError(f"{self.peer} closed the connection{cause}"))
        self._transport = None
        self._closed.set()

    async def wait_closed(self) -> None:
        """Wait for the socket to close after `close`, for a peer that reads at most a second."""
        if not await ends_within(self._closed.wait(), 1.0) and self._transport is not None:
            self._transport.abort()

    def _lose(self, error: TandemError) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()
        self.on_lost(error)
        self._reader = None  # frees an unfinished frame

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
