"""The state of every KV block: free, cached, held or quarantined. Pure; no tensors."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from tandem.engine.schedule.windows import NO_BLOCK, first_read

HashListener = Callable[[list[bytes]], None]

QUARANTINED = -1  # in place of a reference count
# The share of the pool that an eviction frees beyond what is needed. With nothing left over an
# allocation takes every hole there is: in a full pool of 4,096 blocks, whose sequences grow a
# little, 512 blocks came in 89 runs (median), and come in 17 with this.
EVICT_AHEAD_FRACTION = 1 / 64


class FreeRuns:
    """Free block ids as maximal runs of adjacent ids, so that allocations stay adjacent.

    Runs lie in classes by the binary logarithm of their length: `take` and `add` are O(1) a run.
    """

    __slots__ = ("_classes", "_first_of", "_length_of", "_occupied", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = 0
        self._length_of: dict[int, int] = {}  # first id of a run |-> its length
        self._first_of: dict[int, int] = {}  # last id of a run |-> its first
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        self._occupied = 0  # bit k: there are runs of length [2**k, 2**(k + 1)), class k
        self._insert(0, num_blocks)

    def runs(self) -> dict[int, int]:
        """Return the length of every run by its first id."""
        return dict(self._length_of)

    def add(self, block_ids: list[int]) -> None:
        """Add ids; each joins the runs beside it."""
        if len(block_ids) == 1:
            self._join(block_ids[0], 1)
            return
        block_ids = sorted(block_ids)
        start = 0
        for i, (left, right) in enumerate(pairwise(block_ids), 1):
            if right != left + 1:
                self._join(block_ids[start], i - start)
                start = i
        if block_ids:
            self._join(block_ids[start], len(block_ids) - start)

    def take(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take ids in as few runs as is cheap to find, following `after` if that is free."""
        assert num_blocks <= self.num_blocks
        taken: list[int] = []
        if after is not None and after + 1 in self._length_of:
            taken = self._split(after + 1, num_blocks)
        while len(taken) < num_blocks:
            missing = num_blocks - len(taken)
            taken += self._split(self._best_run(missing), missing)
        return taken

    def _best_run(self, num_blocks: int) -> int:
        """Return the first id of a run of the smallest class that surely fits, else the largest."""
        fitting = (num_blocks - 1).bit_length()
        candidates = self._occupied >> fitting
        if candidates:
            size_class = fitting + (candidates & -candidates).bit_length() - 1
        else:
            size_class = self._occupied.bit_length() - 1
        # popitem rather than next(): iteration steps over every entry deleted before.
        runs = self._classes[size_class]
        first, _ = runs.popitem()
        runs[first] = None
        return first

    def _split(self, first: int, num_blocks: int) -> list[int]:
        length = self._remove(first)
        count = min(length, num_blocks)
        self._insert(first + count, length - count)
        return list(range(first, first + count))

    def _join(self, first: int, length: int) -> None:
        left = self._first_of.get(first - 1)
        if left is not None:
            length += self._remove(left)
            first = left
        if first + length in self._length_of:
            length += self._remove(first + length)
        self._insert(first, length)

    def _insert(self, first: int, length: int) -> None:
        if length == 0:
            return
        size_class = length.bit_length() - 1
        self._length_of[first] = length
        self._first_of[first + length - 1] = first
        self._classes[size_class][first] = None
        self._occupied |= 1 << size_class
        self.num_blocks += length

    def _remove(self, first: int) -> int:
        length = self._length_of.pop(first)
        del self._first_of[first + length - 1]
        size_class = length.bit_length() - 1
        del self._classes[size_class][first]
        if not self._classes[size_class]:
            self._occupied &= ~(1 << size_class)
        self.num_blocks -= length
        return length


class BlockPool:
    """Reference counts, prefix cache and quarantine over `num_blocks` blocks.

    A block is *free*, *held* by one or more sequences, *cached* (not held, its hash is known; the
    least recently used is evicted first), or *quarantined* (a write may still land in it).
    `on_stored` and `on_removed` are called with hashes that entered or left the cache, on the
    caller's thread.

    A block holds the K/V of one group of layers. `windows` are those of the groups, 0 where a query
    sees all positions, as it does in the first group if in any: the listeners are called for that.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.num_groups = len(windows)
        self.has_windows = any(windows)
        self.enable_prefix_cache = enable_prefix_cache
        self.on_stored: HashListener | None = None
        self.on_removed: HashListener | None = None
        self.num_quarantined = 0
        self.num_returns = 0  # grows whenever blocks may have become available
        self._num_refs = [0] * num_blocks  # block id |-> holders, or QUARANTINED
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = bytearray(num_blocks)  # of blocks with a hash
        self._blocks_of: list[dict[bytes, int]] = [{} for _ in windows]  # by group
        self._evictable: OrderedDict[int, bytes] = OrderedDict()  # cached, next victim first
        self._free = FreeRuns(num_blocks)
        self._num_evict_ahead = int(num_blocks * EVICT_AHEAD_FRACTION)

    @property
    def num_free(self) -> int:
        return self._free.num_blocks

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` could give: free and cached ones."""
        return self._free.num_blocks + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available - self.num_quarantined

    def count_prefix(self, hashes: Sequence[bytes]) -> int:
        """Count the leading hashes whose K/V is cached as far as later tokens read it."""
        num_hashes = len(hashes)
        for group, window in enumerate(self.windows):
            if not window:
                num_hashes = self._count_leading(hashes[:num_hashes], group)
        longest = None
        while longest != num_hashes:
            longest = num_hashes
            for group, window in enumerate(self.windows):
                if window:
                    num_hashes = self._count_in_window(hashes[:num_hashes], group, window)
        return num_hashes

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Take a reference to each block of the prefix of `count_prefix`; return its table."""
        hashes = hashes[: self.count_prefix(hashes)]
        table = [NO_BLOCK] * (len(hashes) * self.num_groups)
        for entry in self.entries_read(len(hashes)):
            ordinal, group = divmod(entry, self.num_groups)
            block_id = self.hold_cached(hashes[ordinal], group)
            assert block_id is not None
            table[entry] = block_id
        return table

    def entries_read(self, num_ordinals: int) -> list[int]:
        """Return the entries of a table of `num_ordinals` that tokens after these read."""
        num_groups, position = self.num_groups, num_ordinals * self.block_size
        starts = [first_read(window, position, self.block_size) for window in self.windows]
        entries = range(num_ordinals * num_groups)
        if not any(starts):
            return list(entries)
        return [each for each in entries if each // num_groups >= starts[each % num_groups]]

    def hold_cached(self, block_hash: bytes, group: int) -> int | None:
        """Take a reference to the cached block of `block_hash` and return it, if there is one."""
        block_id = self._blocks_of[group].get(block_hash)
        if block_id is not None:
            if self._num_refs[block_id] == 0:
                del self._evictable[block_id]
            self._num_refs[block_id] += 1
        return block_id

    def _count_leading(self, hashes: Sequence[bytes], group: int) -> int:
        blocks = self._blocks_of[group]
        for num_found, block_hash in enumerate(hashes):
            if block_hash not in blocks:
                return num_found
        return len(hashes)

    def _count_in_window(self, hashes: Sequence[bytes], group: int, window: int) -> int:
        """Count the most leading hashes of which the last ones, within the window, are cached."""
        blocks, size = self._blocks_of[group], self.block_size
        num_hashes = ordinal = len(hashes)
        while ordinal > first_read(window, num_hashes * size, size):
            ordinal -= 1
            if hashes[ordinal] not in blocks:
                num_hashes = ordinal
        return num_hashes

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int] | None:
        """Take blocks with one reference each, following block `after` if that is free.

        Evicts cached blocks when too few are free. None, with nothing changed, when too few are
        available.
        """
        shortage = num_blocks - self._free.num_blocks
        if shortage > 0:
            if shortage > len(self._evictable):
                return None
            self._evict(min(shortage + self._num_evict_ahead, len(self._evictable)))
        block_ids = self._free.take(num_blocks, after)
        num_refs = self._num_refs
        for block_id in block_ids:
            num_refs[block_id] = 1
        return block_ids

    def publish(self, block_ids: Sequence[int], hashes: Sequence[bytes], group: int = 0) -> int:
        """Let `match_prefix` find full held blocks of `group`; return how many it newly finds.

        Where another block has the hash of one, this one stays private. NO_BLOCK is passed over.
        """
        if not self.enable_prefix_cache:
            return 0
        blocks, refs = self._blocks_of[group], self._num_refs
        hash_of, group_of, stored = self._hash_of, self._group_of, []
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_id != NO_BLOCK and block_hash not in blocks:
                assert refs[block_id] > 0 and hash_of[block_id] is None, block_id
                blocks[block_hash] = block_id
                hash_of[block_id] = block_hash
                group_of[block_id] = group
                stored.append(block_hash)
        if stored and group == 0 and self.on_stored is not None:
            self.on_stored(stored)
        return len(stored)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each. The last blocks of a table will be evicted first."""
        refs, hash_of, evictable, unhashed = self._num_refs, self._hash_of, self._evictable, []
        for block_id in reversed(block_ids):
            num_refs = refs[block_id] - 1
            assert num_refs >= 0, f"block {block_id} is freed but not held"
            refs[block_id] = num_refs
            if num_refs == 0:
                block_hash = hash_of[block_id]
                if block_hash is None:
                    unhashed.append(block_id)
                else:
                    evictable[block_id] = block_hash
        self._free.add(unhashed)
        self.num_returns += 1

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Withhold held, unpublished blocks from all use until `release_quarantined`."""
        for block_id in block_ids:
            assert self._num_refs[block_id] == 1 and self._hash_of[block_id] is None, block_id
            self._num_refs[block_id] = QUARANTINED
        self.num_quarantined += len(block_ids)

    def release_quarantined(self, block_ids: Sequence[int]) -> None:
        """Free quarantined blocks, in which no write can land any more."""
        for block_id in block_ids:
            assert self._num_refs[block_id] == QUARANTINED, f"block {block_id} is not quarantined"
            self._num_refs[block_id] = 0
        self.num_quarantined -= len(block_ids)
        self._free.add(list(block_ids))
        self.num_returns += 1

    def clear_cache(self) -> int:
        """Free all cached blocks; return their number. Blocks that a sequence holds stay known."""
        num_cached = len(self._evictable)
        if num_cached:
            self._evict(num_cached)
        return num_cached

    def _evict(self, num_blocks: int) -> None:
        next_victim, hash_of, group_of = self._evictable.popitem, self._hash_of, self._group_of
        blocks_of, block_ids, removed = self._blocks_of, [], []
        for _ in range(num_blocks):
            block_id, block_hash = next_victim(last=False)
            block_ids.append(block_id)
            hash_of[block_id] = None
            group = group_of[block_id]
            del blocks_of[group][block_hash]
            if group == 0:
                removed.append(block_hash)
        self._free.add(block_ids)
        if removed and self.on_removed is not None:
            self.on_removed(removed)

    def check_invariants(self, num_holders: dict[int, int] | None = None) -> None:
        """Assert free + cached + held + quarantined == total, counted from the blocks themselves.

        `num_holders`: block id |-> number of tables that list it, compared with the references.
        """
        num_refs = self._num_refs
        num_idle = num_refs.count(0)
        num_quarantined = num_refs.count(QUARANTINED)
        assert min(num_refs, default=0) >= QUARANTINED
        assert num_quarantined == self.num_quarantined
        assert num_idle == self.num_free + self.num_cached, "blocks were lost or counted twice"
        assert self.num_held == self.num_blocks - num_idle - num_quarantined
        runs = self._free.runs()
        assert sum(runs.values()) == self.num_free
        for first, length in runs.items():
            assert first + length not in runs, "adjacent runs were not joined"
            assert not any(num_refs[first : first + length])
            assert self._hash_of[first : first + length].count(None) == length
        assert all(num_refs[i] == 0 for i in self._evictable)
        assert all(self._hash_of[i] == block_hash for i, block_hash in self._evictable.items())
        for group, blocks in enumerate(self._blocks_of):
            assert all(self._hash_of[i] == block_hash for block_hash, i in blocks.items())
            assert all(self._group_of[i] == group for i in blocks.values())
        num_known = sum(len(blocks) for blocks in self._blocks_of)
        assert num_known == self.num_blocks - self._hash_of.count(None)
        if num_holders is not None:
            held = {i: count for i, count in enumerate(num_refs) if count > 0}
            assert held == num_holders, "references and block tables disagree"
