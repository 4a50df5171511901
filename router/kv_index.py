"""Which decode worker holds which KV blocks, from the workers' own events. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.runtime.messages import KvEvent


@dataclass(slots=True)
class _Source:
    """One instance: how far its events have been applied, and the blocks it holds."""

    epoch: str
    last_event_id: int
    is_current: bool = True  # False after a gap, until a snapshot
    held: set[bytes] = field(default_factory=set)


class KvIndex:
    """Block hash |-> instances that hold it.

    A match is never longer than what the instance said it holds: doubt (a gap, a new epoch, the
    size bound) only ever shortens it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()  # least recently used first
        self._sources: dict[str, _Source] = {}

    @property
    def num_entries(self) -> int:
        """(block, instance) pairs remembered."""
        return self._num_entries

    def apply(self, event: KvEvent) -> bool:
        """Take in the next event of an instance; one seen before changes nothing.

        False: events are missing, what was known of the instance is dropped, and nothing more is
        applied until `load_snapshot`.
        """
        source = self._sources.get(event.instance_id)
        if source is None or source.epoch != event.epoch:
            self.remove_instance(event.instance_id)
            source = self._sources[event.instance_id] = _Source(event.epoch, 0)
        if not source.is_current:
            return False
        if event.event_id <= source.last_event_id:
            return True
        if event.event_id > source.last_event_id + 1:
            self._clear(event.instance_id, source)
            source.is_current = False
            return False
        source.last_event_id = event.event_id
        self._change(event, source)
        return True

    def load_snapshot(self, snapshot: KvEvent) -> None:
        """Replace all that is known of an instance; its `event_id` is the last one included."""
        self.remove_instance(snapshot.instance_id)
        source = _Source(snapshot.epoch, snapshot.event_id)
        self._sources[snapshot.instance_id] = source
        self._change(snapshot, source)

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance."""
        source = self._sources.pop(instance_id, None)
        if source is not None:
            self._clear(instance_id, source)

    def match(self, hashes: list[bytes]) -> dict[str, int]:
        """Instance |-> number of leading blocks of `hashes` it holds; only where at least one."""
        depth: dict[str, int] = {}
        alive: set[str] = set()
        for index, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash)
            if holders is None:
                break
            self._holders.move_to_end(block_hash)
            alive = set(holders) if index == 0 else alive & holders
            if not alive:
                break
            for instance_id in alive:
                depth[instance_id] = index + 1
        return depth

    def _change(self, event: KvEvent, source: _Source) -> None:
        if event.cleared:
            self._clear(event.instance_id, source)
        for block_hash in event.removed:
            if block_hash in source.held:
                source.held.remove(block_hash)
                self._release(block_hash, event.instance_id)
        for block_hash in event.stored:
            self._add(block_hash, event.instance_id, source)
        while self._num_entries > self._max_entries:
            self._evict_oldest()

    def _add(self, block_hash: bytes, instance_id: str, source: _Source) -> None:
        if block_hash not in source.held:
            source.held.add(block_hash)
            self._holders.setdefault(block_hash, set()).add(instance_id)
            self._num_entries += 1
        self._holders.move_to_end(block_hash)

    def _release(self, block_hash: bytes, instance_id: str) -> None:
        holders = self._holders[block_hash]
        holders.remove(instance_id)
        self._num_entries -= 1
        if not holders:
            del self._holders[block_hash]

    def _clear(self, instance_id: str, source: _Source) -> None:
        for block_hash in source.held:
            self._release(block_hash, instance_id)
        source.held.clear()

    def _evict_oldest(self) -> None:
        block_hash, holders = self._holders.popitem(last=False)
        for instance_id in holders:
            self._sources[instance_id].held.remove(block_hash)
        self._num_entries -= len(holders)
