"""Which tokens the next step computes. Pure: moves sequences and blocks, never a tensor.

add ─▶ waiting ─start─▶ running ─finish─▶ gone, or parked until release (prefill_only)
          ▲  ▲────preempt───┘ ▲
          │                   │ admit
  requeue └──── remote ───────┘        reserve ─▶ remote
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import chain

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import EngineConfig
from tandem.engine.sequence import Chunk, Sequence, SequenceStatus
from tandem.runtime.block_hash import block_hashes

WATERMARK_FRACTION = 0.01  # of the pool, left free for running sequences to grow into


@dataclass(slots=True, frozen=True)
class PrefixPull:
    """The head of a prompt whose K/V comes from elsewhere, before its sequence is added."""

    block_table: list[int]
    block_hashes: list[bytes]  # of these blocks
    num_cached_blocks: int  # leading ones that were here already; held, so that they stay


class Scheduler:
    """Continuous batching under a token budget: decodes first, then prompts in order of arrival.

    A sequence that starts gets blocks for every token it has; only decoding takes more. When
    there are none left the youngest sequence gives its blocks back and is computed again later.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.pool = pool
        # A seat is a place in a decode step, so there are never more than tokens in a step.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.prefill_chunk_tokens = config.prefill_chunk_tokens
        self.num_watermark_blocks = max(1, int(pool.num_blocks * WATERMARK_FRACTION))
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: dict[str, Sequence] = {}  # oldest first
        self.remote: dict[str, Sequence] = {}
        self.parked: dict[str, Sequence] = {}  # finished, but a transfer may read their blocks
        self.pulls: dict[str, PrefixPull] = {}
        self.num_preemptions = 0
        self.is_blocked = False  # the last schedule found nothing; only a change from outside helps
        self._num_blocks_awaited = 0  # what the head of the queue lacked when it was last tried
        self._num_returns_seen = -1  # ... and the pool's num_returns then

    def find(self, request_id: str) -> Sequence | None:
        for group in (self.running, self.waiting, self.remote, self.parked):
            if request_id in group:
                return group[request_id]
        return None

    def add(self, seq: Sequence) -> None:
        self.waiting[seq.request_id] = seq
        self.is_blocked = False

    def schedule(self) -> list[Chunk]:
        """The chunks of one step: decodes, then chunks of prompts; empty when nothing can run."""
        chunks, prefilling = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(chunks)
        if chunks:
            budget = min(budget, self.prefill_chunk_tokens)
        if prefilling is not None:
            budget -= self._schedule_prefill(prefilling, budget, chunks)
        while budget > 0 and (started := self._start_next()) is not None:
            budget -= self._schedule_prefill(started, budget, chunks)
        self.is_blocked = not chunks
        return chunks

    def advance(self, seq: Sequence, end: int) -> None:
        """Positions below `end` have K/V now: publish the blocks that became full."""
        seq.num_computed_tokens = end
        if end >= (seq.num_published_blocks + 1) * self.pool.block_size:
            self._publish_full_blocks(seq)

    def finish(self, seq: Sequence) -> None:
        """End a waiting or running sequence; a prefill_only one keeps its blocks until `drop`."""
        if self.running.pop(seq.request_id, None) is None:
            del self.waiting[seq.request_id]
            self._num_blocks_awaited = 0
        seq.status = SequenceStatus.FINISHED
        if seq.prefill_only and seq.block_table:
            self.parked[seq.request_id] = seq
        else:
            self._give_back(seq)

    def drop(self, seq: Sequence, *, quarantined: bool = False) -> None:
        """Forget a sequence in any state; `quarantined`: writes into its reservation may land."""
        for group in (self.running, self.waiting, self.remote, self.parked):
            group.pop(seq.request_id, None)
        quarantined = quarantined and seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
        self._give_back(seq, quarantined=quarantined)
        seq.status = SequenceStatus.FINISHED
        self._num_blocks_awaited = 0
        self.is_blocked = False

    def reserve(self, seq: Sequence) -> bool:
        """Give `seq` its prompt's blocks and a seat until `admit`, `requeue` or `drop`.

        False: taking them now would starve running sequences or those that came before.
        """
        if len(self.running) + len(self.remote) + len(self.waiting) >= self.max_num_seqs:
            return False
        if not self._take_blocks(seq, self.num_watermark_blocks + self._num_blocks_awaited):
            return False
        seq.num_reserved_cached_blocks = seq.num_published_blocks
        seq.status = SequenceStatus.WAITING_FOR_REMOTE_KVS
        self.remote[seq.request_id] = seq
        return True

    def reserve_prefix(self, seq: Sequence, num_blocks: int) -> list[tuple[int, int]] | None:
        """Hold the first `num_blocks` of `seq`'s blocks that can be shared until `end_pull`.

        (ordinal, block id) of those to be filled; nothing is held when there are none. None:
        there is no prefix cache, or taking them would starve others, as in `reserve`.
        """
        if not self.pool.enable_prefix_cache:
            return None
        hashes = self._prefix_hashes(seq)[:num_blocks]
        cached = self.pool.match_prefix(hashes)
        num_missing = len(hashes) - len(cached)
        if num_missing == 0:
            self.pool.free(cached)
            return []
        num_spare_blocks = self.num_watermark_blocks + self._num_blocks_awaited
        fresh = self._extend(cached, num_missing, num_spare_blocks)
        if fresh is None:
            return None
        self.pulls[seq.request_id] = PrefixPull(cached + fresh, hashes, len(cached))
        return list(enumerate(fresh, start=len(cached)))

    def end_pull(self, request_id: str, *, proven: bool, quarantined: bool = False) -> bool:
        """Let go of a pull's blocks, published if `proven`; False when there is no such pull."""
        pull = self.pulls.pop(request_id, None)
        if pull is None:
            return False
        num_cached, num_freed = pull.num_cached_blocks, len(pull.block_table)
        if proven:
            for i in range(num_cached, num_freed):
                self.pool.publish(pull.block_table[i], pull.block_hashes[i])
        elif quarantined:
            self.pool.quarantine(pull.block_table[num_cached:])
            num_freed = num_cached
        self.pool.free(pull.block_table[:num_freed])
        self.is_blocked = False
        return True

    def admit(self, seq: Sequence) -> None:
        """The reserved blocks hold the K/V of the whole prompt: run on from there."""
        del self.remote[seq.request_id]
        seq.status = SequenceStatus.RUNNING
        self.running[seq.request_id] = seq
        self.advance(seq, seq.num_prompt_tokens)
        self.is_blocked = False

    def requeue(self, seq: Sequence, *, quarantined: bool) -> None:
        """Put a sequence with a reservation at the head of the queue, without its blocks."""
        del self.remote[seq.request_id]
        self._give_back(seq, quarantined=quarantined)
        self._wait_first(seq)

    def release_quarantined(self, block_ids: list[int]) -> None:
        self.pool.release_quarantined(block_ids)
        self.is_blocked = False

    def num_prefix_blocks(self, seq: Sequence) -> int:
        """How many leading blocks of `seq` the prefix cache holds now, at most all but one token.

        Shared blocks are never written, so the block of the last token is always computed.
        """
        return self.pool.count_prefix(self._prefix_hashes(seq))

    def _schedule_decodes(self) -> tuple[list[Chunk], Sequence | None]:
        """One token for everybody who has but one to compute; and who is within their prompt.

        That is one sequence at most: the next starts only when a step's budget outlasts it.
        """
        chunks: list[Chunk] = []
        prefilling = None
        block_size = self.pool.block_size
        for seq in list(self.running.values()):
            start, end = seq.num_computed_tokens, len(seq.token_ids)
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it in this very loop
            if end - start > 1:
                assert prefilling is None
                prefilling = seq
            elif start < len(seq.block_table) * block_size or self._grow(seq):
                chunks.append(Chunk(seq, start, end, True))
        return chunks, prefilling

    def _schedule_prefill(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        start, num_tokens = seq.num_computed_tokens, len(seq.token_ids)
        end = min(num_tokens, start + budget)
        chunks.append(Chunk(seq, start, end, end == num_tokens))
        return end - start

    def _start_next(self) -> Sequence | None:
        """Move the head of the queue to the running ones, if there is a seat and blocks for it."""
        if not self.waiting or len(self.running) + len(self.remote) >= self.max_num_seqs:
            return None
        seq = next(iter(self.waiting.values()))
        if self._num_blocks_awaited and self._num_returns_seen == self.pool.num_returns:
            return None
        num_spare_blocks = self.num_watermark_blocks if self.running else 0
        if not self._take_blocks(seq, num_spare_blocks):
            self._num_blocks_awaited = self._num_blocks(seq)
            self._num_returns_seen = self.pool.num_returns
            return None
        self._num_blocks_awaited = 0
        del self.waiting[seq.request_id]
        seq.status = SequenceStatus.RUNNING
        self.running[seq.request_id] = seq
        return seq

    def _take_blocks(self, seq: Sequence, num_spare_blocks: int) -> bool:
        """Blocks for every token of `seq`, leading ones from the prefix cache; all or nothing."""
        cached = self.pool.match_prefix(self._prefix_hashes(seq))
        fresh = self._extend(cached, self._num_blocks(seq) - len(cached), num_spare_blocks)
        if fresh is None:
            return False
        seq.block_table = cached + fresh
        seq.num_published_blocks = len(cached)
        seq.num_computed_tokens = len(cached) * self.pool.block_size
        if seq.num_generated_tokens == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def _extend(
        self, cached: list[int], num_blocks: int, num_spare_blocks: int
    ) -> list[int] | None:
        """Fresh blocks to follow the held `cached`; without enough of them `cached` is freed."""
        fresh = None
        if num_blocks + num_spare_blocks <= self.pool.num_available:
            fresh = self.pool.allocate(num_blocks, after=cached[-1] if cached else None)
        if fresh is None:
            self.pool.free(cached)
        return fresh

    def _grow(self, seq: Sequence) -> bool:
        """One more block for `seq`, from the youngest sequence at need. False: that was `seq`."""
        while (fresh := self.pool.allocate(1, after=seq.block_table[-1])) is None:
            # A prefill_only sequence is never a victim: a transfer may be reading its blocks.
            youngest = next(s for s in reversed(self.running.values()) if not s.prefill_only)
            del self.running[youngest.request_id]
            self._give_back(youngest)
            self._wait_first(youngest)
            self.num_preemptions += 1
            if youngest is seq:
                return False
        seq.block_table += fresh
        return True

    def _wait_first(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        self.waiting[seq.request_id] = seq
        self.waiting.move_to_end(seq.request_id, last=False)
        self._num_blocks_awaited = 0
        self.is_blocked = False

    def _give_back(self, seq: Sequence, *, quarantined: bool = False) -> None:
        num_kept = seq.num_reserved_cached_blocks if quarantined else len(seq.block_table)
        self.pool.quarantine(seq.block_table[num_kept:])
        self.pool.free(seq.block_table[:num_kept])
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0
        seq.num_reserved_cached_blocks = 0

    def _num_blocks(self, seq: Sequence) -> int:
        return -(-len(seq.token_ids) // self.pool.block_size)

    def _prefix_hashes(self, seq: Sequence) -> list[bytes]:
        if not self.pool.enable_prefix_cache:
            return []
        self._hash_full_blocks(seq)
        return seq.block_hashes[: (len(seq.token_ids) - 1) // self.pool.block_size]

    def _hash_full_blocks(self, seq: Sequence) -> None:
        """Continue the chain over the blocks that its tokens fill by now."""
        block_size = self.pool.block_size
        hashed = len(seq.block_hashes)
        if (hashed + 1) * block_size <= len(seq.token_ids):
            seq.block_hashes += block_hashes(
                seq.token_ids[hashed * block_size :] if hashed else seq.token_ids,
                block_size,
                salt=seq.cache_salt,
                parent=seq.block_hashes[-1] if hashed else None,
            )

    def _publish_full_blocks(self, seq: Sequence) -> None:
        num_full = seq.num_computed_tokens // self.pool.block_size
        if self.pool.enable_prefix_cache:
            self._hash_full_blocks(seq)
            for i in range(seq.num_published_blocks, num_full):
                self.pool.publish(seq.block_table[i], seq.block_hashes[i])
        seq.num_published_blocks = num_full

    def check_invariants(self) -> None:
        """Assert that states, tables and the pool's references agree, block by block."""
        tables = [pull.block_table for pull in self.pulls.values()]
        for seq in chain(self.running.values(), self.remote.values(), self.parked.values()):
            assert len(seq.block_table) * self.pool.block_size >= seq.num_computed_tokens
            tables.append(seq.block_table)
        self.pool.check_invariants(Counter(chain.from_iterable(tables)))
        assert all(not seq.block_table for seq in self.waiting.values())
        assert len(self.running) + len(self.remote) <= self.max_num_seqs
        for group, status in (
            (self.waiting, SequenceStatus.WAITING),
            (self.running, SequenceStatus.RUNNING),
            (self.remote, SequenceStatus.WAITING_FOR_REMOTE_KVS),
            (self.parked, SequenceStatus.FINISHED),
        ):
            assert all(seq.status is status for seq in group.values())
