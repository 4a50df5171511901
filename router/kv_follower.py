"""A KV index kept up to date: by events of the workers, and by a dump after a gap."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from tandem.router.kv_index import KvIndex
from tandem.runtime.errors import ProtocolError, TandemError
from tandem.runtime.wire.cluster_messages import KvEvent
from tandem.runtime.wire.decoding import RefusalLog, decoder

logger = logging.getLogger(__name__)

_PAUSE_AFTER_FAILURE_S = 1.0
_MAX_BUFFERED_EVENTS = 10_000

decode_kv_event = decoder(KvEvent)
_refusals = RefusalLog(logger, "a KV event")


class KvFollower:
    """Applies the events of the instances that were added to `index`.

    `dump` returns all blocks of an instance as one event in msgpack. When it raises a TandemError,
    the instance counts as empty until its next event.
    """

    def __init__(self, index: KvIndex, dump: Callable[[str], Awaitable[bytes]]) -> None:
        self.index = index
        self._dump = dump
        self._known: set[str] = set()
        self._buffers: dict[str, deque[KvEvent]] = {}  # events that came during a resync
        self._resyncs: set[asyncio.Task[None]] = set()

    def add(self, instance_id: str, *, has_dump: bool = True) -> None:
        """Follow an instance, from a dump on or, without one, from its next event on."""
        if instance_id not in self._known:
            self._known.add(instance_id)
            if has_dump:
                self._resync(instance_id, None)

    def remove(self, instance_id: str) -> None:
        """Forget an instance."""
        self._known.discard(instance_id)
        self.index.remove_instance(instance_id)

    def on_event(self, subject: str, payload: bytes) -> None:
        """Apply a message. The last part of its subject is the instance.

        Messages of instances that are not followed are ignored.
        """
        sender = subject.rpartition(".")[2]
        if sender not in self._known:
            return
        try:
            event = decode_kv_event(payload)
        except ProtocolError as error:
            _refusals.note(sender, error)
            return
        if event.instance_id not in self._known:
            return
        buffer = self._buffers.get(event.instance_id)
        if buffer is not None:
            buffer.append(event)
        elif not self.index.apply(event):
            self._resync(event.instance_id, event)

    async def settled(self, timeout_s: float) -> None:
        """Wait until no dump is under way, at most `timeout_s`."""
        if self._resyncs:
            await asyncio.wait(self._resyncs, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel the dumps under way, and apply no more events."""
        self._known.clear()
        resyncs = list(self._resyncs)
        for task in resyncs:
            task.cancel()
        await asyncio.gather(*resyncs, return_exceptions=True)

    def _resync(self, instance_id: str, event: KvEvent | None) -> None:
        self._buffers[instance_id] = deque(
            [] if event is None else [event], maxlen=_MAX_BUFFERED_EVENTS
        )
        task = asyncio.get_running_loop().create_task(self._load_dump(instance_id))
        self._resyncs.add(task)
        task.add_done_callback(self._resyncs.discard)

    async def _load_dump(self, instance_id: str) -> None:
        """Load a dump. Events that come meanwhile wait in a buffer; the dump covers the oldest."""
        try:
            snapshot = decode_kv_event(await self._dump(instance_id))
            if instance_id in self._known and snapshot.instance_id == instance_id:
                self.index.load_snapshot(snapshot)
        except TandemError as error:
            logger.info("no KV snapshot of %s: %s", instance_id, error)
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
        finally:
            buffered = self._buffers.pop(instance_id, ())
        for event in buffered:
            if instance_id in self._known and not self.index.apply(event):
                self._resync(instance_id, event)
                return
