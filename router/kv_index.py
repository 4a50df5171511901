"""The KV blocks that each decode worker holds, from the events of the workers. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from tandem.runtime.messages import KvEvent

_SHARE_EVICTED = 64  # a full index evicts this part of itself at a time
# Iterating over a dict also passes the places of removed entries, so the oldest entries are evicted
# many at a time and never one by one.

_Blocks = dict[bytes, None]  # hashes; once the index is nearly full, least recently used first


@dataclass(slots=True)
class _Source:
    """One instance and the last event of it that was applied."""

    epoch: str
    last_event_id: int
    is_current: bool = True  # False after a gap, until a snapshot


class KvIndex:
    """Instance |-> hashes of the blocks it holds.

    A match is never longer than the blocks that the instance has reported. A gap, a new epoch and
    the size limit only shorten it. An entry takes about 130 bytes.

    Each instance has a table of its own, which is written and read in plain loops: storing,
    removing and looking up a block take one probe each, and removing an instance drops its table.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._is_nearly_full = False  # before that, the order of use does not matter
        self._sources: dict[str, _Source] = {}
        self._held: dict[str, _Blocks] = {}  # of the same instances

    @property
    def num_entries(self) -> int:
        """(block, instance) pairs in the index."""
        return self._num_entries

    def apply(self, event: KvEvent) -> bool:
        """Apply the next event of an instance. An event seen before changes nothing.

        Returns False when events are missing. The blocks of the instance are dropped then, and
        nothing more is applied until `load_snapshot`.
        """
        source = self._sources.get(event.instance_id)
        if source is None or source.epoch != event.epoch:
            source = self._begin(event.instance_id, event.epoch, 0)
        if not source.is_current:
            return False
        if event.event_id <= source.last_event_id:
            return True
        if event.event_id > source.last_event_id + 1:
            self._clear(event.instance_id)
            source.is_current = False
            return False
        source.last_event_id = event.event_id
        self._change(event)
        return True

    def load_snapshot(self, snapshot: KvEvent) -> None:
        """Replace the blocks of an instance. The snapshot's `event_id` is the last one included."""
        self._begin(snapshot.instance_id, snapshot.epoch, snapshot.event_id)
        self._change(snapshot)

    def remove_instance(self, instance_id: str) -> None:
        """Remove an instance and its blocks."""
        if self._sources.pop(instance_id, None) is not None:
            self._count(-len(self._held.pop(instance_id)))

    def holds_any(self, instance_ids: Iterable[str]) -> bool:
        """Return True if any of these instances holds a block; otherwise none can match."""
        return any(map(self._held.get, instance_ids))

    def match(
        self, hashes: Sequence[bytes], instance_ids: Iterable[str] | None = None
    ) -> dict[str, int]:
        """Return instance |-> number of leading blocks of `hashes` it holds, where not zero.

        All instances are looked at, or only `instance_ids`.
        """
        depths: dict[str, int] = {}
        if not hashes:
            return depths
        first = hashes[0]
        for instance_id in self._held if instance_ids is None else instance_ids:
            held = self._held.get(instance_id)
            if held is None or first not in held:
                continue
            depth = len(hashes)
            for index, block_hash in enumerate(hashes):
                if block_hash not in held:
                    depth = index
                    break
            depths[instance_id] = depth
            if self._is_nearly_full:
                _use(held, hashes[:depth])
        return depths

    def _begin(self, instance_id: str, epoch: str, last_event_id: int) -> _Source:
        self.remove_instance(instance_id)
        self._held[instance_id] = {}
        source = self._sources[instance_id] = _Source(epoch, last_event_id)
        return source

    def _change(self, event: KvEvent) -> None:
        if event.cleared:
            self._clear(event.instance_id)
        held = self._held[event.instance_id]
        num_before = len(held)
        for block_hash in event.removed:
            held.pop(block_hash, None)
        if self._is_nearly_full:
            _use(held, event.stored)
        else:
            for block_hash in reversed(event.stored):  # reversed as in `_use`
                held[block_hash] = None
        self._count(len(held) - num_before)
        if self._num_entries > self._max_entries:
            self._shrink()

    def _clear(self, instance_id: str) -> None:
        self._count(-len(self._held[instance_id]))
        self._held[instance_id] = {}

    def _count(self, num_new: int) -> None:
        self._num_entries += num_new
        self._is_nearly_full = 4 * self._num_entries >= 3 * self._max_entries

    def _shrink(self) -> None:
        """Evict the oldest blocks of the instance with the most, until there is some room."""
        room = self._max_entries // _SHARE_EVICTED
        while self._num_entries > self._max_entries - room:
            held = max(self._held.values(), key=len)
            num_excess = self._num_entries - (self._max_entries - room)
            oldest = list(islice(held, min(num_excess, max(1, room))))
            for block_hash in oldest:
                del held[block_hash]
            self._count(-len(oldest))


def _use(held: _Blocks, hashes: Sequence[bytes]) -> None:
    """Make `hashes` the youngest, the first one last: a chain is useless without its start."""
    for block_hash in reversed(hashes):
        held.pop(block_hash, None)
        held[block_hash] = None
