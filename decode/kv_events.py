"""The events by which a decode worker publishes the content of its prefix cache."""

import asyncio
from collections import deque

from tandem.runtime.bus.events import Events, kv_subject
from tandem.runtime.wire.cluster_messages import KvEvent
from tandem.runtime.wire.messages import encode


class KvEventPublisher:
    """Turns the block pool's callbacks into KvEvents without gaps.

    `stored` and `removed` are called on the engine thread, everything else on the event loop.
    """

    def __init__(self, events: Events, namespace: str, instance_id: str, epoch: str) -> None:
        self._events = events
        self._subject = kv_subject(namespace, instance_id)
        self._instance_id = instance_id
        self._epoch = epoch
        self._event_id = 0
        self._event_id_at_beat = 0
        self._loop = asyncio.get_running_loop()
        self._changes: deque[tuple[bool, list[bytes]]] = deque()  # (stored, hashes)
        self._hashes: set[bytes] = set()

    def stored(self, block_hashes: list[bytes]) -> None:
        self._changed(True, block_hashes)

    def removed(self, block_hashes: list[bytes]) -> None:
        self._changed(False, block_hashes)

    def _changed(self, stored: bool, block_hashes: list[bytes]) -> None:
        self._changes.append((stored, block_hashes))
        if len(self._changes) == 1:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        last: dict[bytes, bool] = {}
        while self._changes:
            is_stored, block_hashes = self._changes.popleft()
            last |= dict.fromkeys(block_hashes, is_stored)
        if not last:
            return
        stored = [block_hash for block_hash, is_stored in last.items() if is_stored]
        removed = [block_hash for block_hash, is_stored in last.items() if not is_stored]
        self._hashes.update(stored)
        self._hashes.difference_update(removed)
        self._send(stored, removed)

    def _send(self, stored: list[bytes], removed: list[bytes]) -> None:
        self._event_id += 1
        event = KvEvent(self._instance_id, self._epoch, self._event_id, stored, removed)
        self._events.publish(self._subject, encode(event))

    def beat(self) -> None:
        """Repeat the number of the last event if none has followed, to reveal a lost event.

        Must be called regularly.
        """
        if self._event_id and self._event_id == self._event_id_at_beat:
            self._send([], [])
        self._event_id_at_beat = self._event_id

    def snapshot(self) -> KvEvent:
        """Return the whole content of the cache, as of the last event."""
        return KvEvent(
            self._instance_id, self._epoch, self._event_id, list(self._hashes), cleared=True
        )
