"""The one stream of KV events of a process, made of the changes of all its publishers."""

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.runtime.bus.events import kv_subject
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.tasks import ends_within
from tandem.runtime.wire.cluster_messages import KvEvent
from tandem.runtime.wire.messages import encode

if TYPE_CHECKING:
    from tandem.sdk.worker.distributed_runtime import DistributedRuntime

HEARTBEAT_S = 2.0  # a lost last event is noticed after at most this long
SNAPSHOT_ENDPOINT = "kv_snapshot"

_streams: "weakref.WeakKeyDictionary[DistributedRuntime, KvStream]" = weakref.WeakKeyDictionary()


class KvStream:
    """Gapless KvEvents, and a dump of all blocks for a follower that missed one.

    Several ranks may hold the same block: it is stored with the first and removed with the last of
    them. `change` may be called from any thread, the other methods on the loop.
    """

    def __init__(self, runtime: "DistributedRuntime") -> None:
        self._runtime = runtime
        self._subjects: set[str] = set()
        self._event_id = 0
        self._holders: dict[bytes, int] = {}  # block hash |-> number of ranks that hold it
        self._changes: deque[tuple[Sequence[bytes], Sequence[bytes]]] = deque()
        self._is_flush_due = False
        self._loop = asyncio.get_running_loop()
        self._heartbeat = self._loop.create_task(self._beat())
        runtime.server.register(SNAPSHOT_ENDPOINT, self._answer)

    def add_namespace(self, namespace: str) -> None:
        """Publish to this namespace as well."""
        self._subjects.add(kv_subject(namespace, self._runtime.instance_id))

    def change(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Record that a rank has stored and removed blocks."""
        self._changes.append((stored, removed))
        if not self._is_flush_due and not self._loop.is_closed():
            self._is_flush_due = True
            self._loop.call_soon_threadsafe(self._flush)

    def snapshot(self) -> KvEvent:
        """Return all blocks held as of the last event."""
        return self._event(list(self._holders), (), cleared=True)

    def _flush(self) -> None:
        """Send one event for all changes since the last one."""
        self._is_flush_due = False  # first: later changes schedule a flush of their own
        before: dict[bytes, bool] = {}
        holders = self._holders
        while self._changes:
            stored, removed = self._changes.popleft()
            for block_hash in removed:
                before.setdefault(block_hash, block_hash in holders)
                num_left = holders[block_hash] - 1
                if num_left:
                    holders[block_hash] = num_left
                else:
                    del holders[block_hash]
            for block_hash in stored:
                before.setdefault(block_hash, block_hash in holders)
                holders[block_hash] = holders.get(block_hash, 0) + 1
        new = [each for each, was_held in before.items() if not was_held and each in holders]
        gone = [each for each, was_held in before.items() if was_held and each not in holders]
        if new or gone:
            self._send(new, gone)

    def _send(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._event_id += 1
        payload = encode(self._event(stored, removed))
        for subject in self._subjects:
            self._runtime.events.publish(subject, payload)

    def _event(
        self, stored: Sequence[bytes], removed: Sequence[bytes], cleared: bool = False
    ) -> KvEvent:
        runtime = self._runtime
        return KvEvent(
            runtime.instance_id, runtime.epoch, self._event_id, list(stored), list(removed), cleared
        )

    async def _beat(self) -> None:
        """Send an empty event after a quiet interval: followers notice a lost event by it."""
        last_id = 0
        while not self._runtime.is_ending:
            await ends_within(self._runtime.ending(), HEARTBEAT_S)
            if self._event_id == last_id and self._event_id:
                self._send((), ())
            last_id = self._event_id
        _streams.pop(self._runtime, None)

    async def _answer(self, _payload: bytes, _context: RequestContext, reply: Responder) -> None:
        reply.send(encode(self.snapshot()))


def kv_stream(runtime: "DistributedRuntime") -> KvStream:
    """Return the process's stream. The first call makes it and must be on the loop."""
    stream = _streams.get(runtime)
    if stream is None:
        stream = _streams[runtime] = KvStream(runtime)
    return stream
