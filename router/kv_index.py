"""The KV blocks that each decode worker holds, from the events of the workers. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tandem.router.predict import Floats
from tandem.runtime.wire.cluster_messages import KvEvent

# A full index evicts this part of itself at a time. Iterating over a dict also passes the places of
# removed entries, so the oldest entries are evicted many at a time and never one by one.
_SHARE_EVICTED = 64

Places = NDArray[np.intp]


@dataclass(slots=True)
class _Source:
    """One instance and the last event of it that was applied."""

    epoch: str
    last_event_id: int
    bit: int  # of the instance, in the sets of holders
    is_current: bool = True  # False after a gap, until a snapshot


class KvIndex:
    """Block hash |-> the instances that hold it, and the hashes of each instance.

    A match is never longer than the blocks that the instance has reported. A gap, a new epoch and
    the size limit only shorten it. An entry takes 100 to 240 bytes.

    The holders of a block are the bits of one integer, so that a block of a prompt is looked up
    once for all instances. A block with one holder has the integer of that instance.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._is_nearly_full = False  # before that, it does not matter what is used
        # Blocks that were looked up since they were last passed over.
        self._used: set[bytes] = set()
        self._sources: dict[str, _Source] = {}
        # Of the same instances; the value of all is the instance's bit. Half as large as sets.
        self._held: dict[str, dict[bytes, int]] = {}
        self._holders: dict[bytes, int] = {}  # the next to be evicted first
        self._names: list[str] = []  # by place in the sets; also of instances that left
        self._free: list[int] = []  # places of instances that left
        self._candidates: list[str] = []  # of the last call of `depths`
        self._places: Places = np.zeros(0, np.intp)  # of these; the one after all others: none

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
        if instance_id in self._sources:
            self._clear(instance_id)
            del self._held[instance_id]
            self._free.append(self._sources.pop(instance_id).bit.bit_length() - 1)
            self._candidates = []

    def holds_any(self, instance_ids: Iterable[str]) -> bool:
        """Return True if any of these instances holds a block; otherwise none can match."""
        return bool(self._holders) and any(map(self._held.get, instance_ids))

    def match(
        self, hashes: Sequence[bytes], instance_ids: Iterable[str] | None = None
    ) -> dict[str, int]:
        """Return instance |-> number of leading blocks of `hashes` it holds, where not zero.

        All instances are looked at, or only `instance_ids`.
        """
        among = -1 if instance_ids is None else 0
        for instance_id in instance_ids or ():
            source = self._sources.get(instance_id)
            among |= source.bit if source else 0
        return {
            name: depth
            for depth, holders in self._levels(hashes, among)
            for name in self._names_of(holders)
        }

    def depths(self, hashes: Sequence[bytes], instance_ids: list[str]) -> Floats:
        """Return the number of leading blocks of `hashes` that each of many instances holds."""
        levels = self._levels(hashes, -1)
        if not levels:
            return np.zeros(len(instance_ids))
        if instance_ids != self._candidates:
            none = len(self._names)
            sources = map(self._sources.get, instance_ids)
            places = [each.bit.bit_length() - 1 if each else none for each in sources]
            self._places, self._candidates = np.array(places, np.intp), list(instance_ids)
        num_bytes = len(self._names) // 8 + 1
        sets = b"".join(holders.to_bytes(num_bytes, "little") for _, holders in levels)
        packed = np.frombuffer(sets, np.uint8).reshape(len(levels), num_bytes)
        is_holder = np.unpackbits(packed, axis=1, bitorder="little")
        depths = np.array([depth for depth, _ in levels], np.float64) @ is_holder
        taken: Floats = depths.take(self._places)
        return taken

    def _levels(self, hashes: Sequence[bytes], among: int) -> list[tuple[int, int]]:
        """Return each depth at which matches end, with the instances whose match ends there."""
        levels, holders = [], self._holders
        depth = 0
        if not among:
            return []
        for block_hash in hashes:
            left = among & holders.get(block_hash, 0)
            if left != among:
                if depth:
                    levels.append((depth, among ^ left))
                among = left
                if not left:
                    break
            depth += 1
        if among and depth:
            levels.append((depth, among))
        if self._is_nearly_full:
            self._used.update(hashes[:depth])
        return levels

    def _names_of(self, holders: int) -> Iterator[str]:
        while holders:
            bit = holders & -holders
            yield self._names[bit.bit_length() - 1]
            holders ^= bit

    def _begin(self, instance_id: str, epoch: str, last_event_id: int) -> _Source:
        self.remove_instance(instance_id)
        if not self._free:
            self._free.append(len(self._names))
            self._names.append(instance_id)
        place = self._free.pop()
        self._names[place] = instance_id
        self._candidates = []
        self._held[instance_id] = {}
        source = self._sources[instance_id] = _Source(epoch, last_event_id, 1 << place)
        return source

    def _change(self, event: KvEvent) -> None:
        if event.cleared:
            self._clear(event.instance_id)
        held, bit = self._held[event.instance_id], self._sources[event.instance_id].bit
        num_before = len(held)
        self._release([each for each in event.removed if held.pop(each, None)], bit)
        # The first one last: a chain is useless without its start.
        added = dict.fromkeys(reversed(event.stored), bit)
        if not held.keys().isdisjoint(added):
            added = {each: bit for each in added if each not in held}
        held.update(added)
        if self._holders.keys().isdisjoint(added):
            self._holders.update(added)
        else:
            for block_hash in added:
                others = self._holders.get(block_hash)
                self._holders[block_hash] = others | bit if others else bit
        self._count(len(held) - num_before)
        if self._num_entries > self._max_entries:
            self._shrink()

    def _clear(self, instance_id: str) -> None:
        held, bit = self._held[instance_id], self._sources[instance_id].bit
        self._release(held, bit)
        self._count(-len(held))
        held.clear()

    def _release(self, hashes: Iterable[bytes], bit: int) -> None:
        holders = self._holders
        for block_hash in hashes:
            if holders[block_hash] == bit:
                del holders[block_hash]
                self._used.discard(block_hash)
            else:
                holders[block_hash] ^= bit

    def _count(self, num_new: int) -> None:
        self._num_entries += num_new
        self._is_nearly_full = 4 * self._num_entries >= 3 * self._max_entries

    def _shrink(self) -> None:
        """Evict the oldest blocks, until there is some room; those in use become the youngest."""
        room = self._max_entries // _SHARE_EVICTED
        while (num_excess := self._num_entries - self._max_entries + room) > 0:
            for block_hash in list(islice(self._holders, max(num_excess, room))):
                holders = self._holders.pop(block_hash)
                if block_hash in self._used:
                    self._used.remove(block_hash)
                    self._holders[block_hash] = holders
                    continue
                for name in self._names_of(holders):
                    del self._held[name][block_hash]
                self._count(-holders.bit_count())
                if self._num_entries <= self._max_entries - room:
                    break
