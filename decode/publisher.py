"""What a decode worker tells the others about itself: its model and its prefix cache."""

import asyncio
import time
from collections import deque

from tandem.engine.engine import Engine
from tandem.runtime.address import EndpointAddress
from tandem.runtime.events import Events, kv_subject
from tandem.runtime.messages import KvEvent, ModelCard, ModelFiles, encode
from tandem.runtime.model_files import files_digest
from tandem.runtime.node import Node


def model_card(
    node: Node,
    endpoint: EndpointAddress,
    engine: Engine,
    files: ModelFiles,
    weights_digest: str,
) -> ModelCard:
    """Return the card of the model that a decode worker serves at `endpoint`."""
    return ModelCard(
        name=node.model,
        context_length=engine.max_model_len,
        block_size=engine.block_pool.block_size,
        vocab_size=engine.runner.model_config.vocab_size,
        files_digest=files_digest(files),
        instance_id=node.instance_id,
        created_s=int(time.time()),
        endpoint=str(endpoint),
        sends_kv_events=True,
        weights_digest=weights_digest,
    )


class CachePublisher:
    """Turns the block pool's callbacks into gapless KvEvents.

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
        """Call it regularly: without news it shows who missed the last event that it was lost."""
        if self._event_id and self._event_id == self._event_id_at_beat:
            self._send([], [])
        self._event_id_at_beat = self._event_id

    def snapshot(self) -> KvEvent:
        """Everything stored now, as of the last event."""
        return KvEvent(
            self._instance_id, self._epoch, self._event_id, list(self._hashes), cleared=True
        )
