"""Which decode worker holds which KV blocks, from the workers' own events. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from tandem.runtime.messages import KvEvent

_SHARE_EVICTED = 64  # a full index gives up this part of itself at a time
# A dict walks over the slots of entries that have left it, so its oldest entries are taken by the
# chunk, never one by one.

_Blocks = dict[bytes, None]  # hashes; once the index is nearly full, least recently used first


@dataclass(slots=True)
class _Source:
    """One instance: how far its events have been applied."""

    epoch: str
    last_event_id: int
    is_current: bool = True  # False after a gap, until a snapshot


class KvIndex:
    """Instance |-> hashes of the blocks it holds.

    A match is never longer than what the instance said it holds: doubt (a gap, a new epoch, the
    size bound) only ever shortens it. An entry takes about 130 bytes.

    Each instance has a table of its own, which is written and read in plain loops: to store, to
    remove or to look up a block is one probe each, and to forget an instance is to drop its table.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._is_nearly_full = False  # before that, it does not matter what was used when
        self._sources: dict[str, _Source] = {}
        self._held: dict[str, _Blocks] = {}  # of the same instances

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
        """Replace all that is known of an instance; its `event_id` is the last one included."""
        self._begin(snapshot.instance_id, snapshot.epoch, snapshot.event_id)
        self._change(snapshot)

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance."""
        if self._sources.pop(instance_id, None) is not None:
            self._count(-len(self._held.pop(instance_id)))

    def holds_any(self, instance_ids: Iterable[str]) -> bool:
        """Whether any of these instances holds a block; if not, nothing matches there."""
        return any(map(self._held.get, instance_ids))

    def match(
        self, hashes: Sequence[bytes], instance_ids: Iterable[str] | None = None
    ) -> dict[str, int]:
        """Instance |-> number of leading blocks of `hashes` it holds; only where at least one.

        Of all instances, or of `instance_ids` only.
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
        """Whoever has most gives up its oldest, until there is some room again."""
        room = self._max_entries // _SHARE_EVICTED
        while self._num_entries > self._max_entries - room:
            held = max(self._held.values(), key=len)
            num_excess = self._num_entries - (self._max_entries - room)
            oldest = list(islice(held, min(num_excess, max(1, room))))
            for block_hash in oldest:
                del held[block_hash]
            self._count(-len(oldest))


def _use(held: _Blocks, hashes: Sequence[bytes]) -> None:
    """Make `hashes` the youngest, the first one last: a chain is of no use without its start."""
    for block_hash in reversed(hashes):
        held.pop(block_hash, None)
        held[block_hash] = None
