"""Which tokens the next step computes. Pure: moves sequences and blocks, never a tensor.

add ─▶ waiting ─start─▶ running ─finish─▶ gone, or parked until release (prefill_only)
          ▲  ▲────preempt───┘ ▲
          │                   │ admit
  requeue └──── remote ───────┘        reserve ─▶ remote
"""

from collections import Counter, OrderedDict
from itertools import chain

from tandem.engine.config import EngineConfig
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.prefix import (
    PrefixPulls,
    publish_full_blocks,
    shareable_hashes,
    take_blocks,
)
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence, SequenceStatus
from tandem.engine.schedule.step_cost import PromptBudget, StepCost

WATERMARK_FRACTION = 0.01  # of the pool, left free for running sequences to grow into


class Scheduler:
    """Continuous batching under a token budget: decodes first, then prompts in order of arrival.

    A sequence that starts gets blocks for every token it has; only decoding takes more. When
    there are none left the youngest sequence gives its blocks back and is computed again later.

    Steps may be launched before the ones before them are collected. What is scheduled goes by what
    was launched; what others may see or get (hashes, blocks) by what was collected.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, step_cost: StepCost) -> None:
        self.pool = pool
        self.step_cost = step_cost
        # A seat is a place in a decode step, so there are never more than tokens in a step.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.prefill_chunk_tokens = config.prefill_chunk_tokens
        self.num_watermark_blocks = max(1, int(pool.num_blocks * WATERMARK_FRACTION))
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: dict[str, Sequence] = {}  # oldest first
        self.remote: dict[str, Sequence] = {}
        self.parked: dict[str, Sequence] = {}  # finished, but a transfer may read their blocks
        self.leaving: set[Sequence] = set()  # gone, but a launched step may write to their blocks
        self.pulls = PrefixPulls(pool)
        self.num_in_flight = 0  # steps launched and not collected
        self.num_preemptions = 0
        self.is_blocked = False  # the last schedule found nothing; only a change from outside helps
        self._free_seats = list(reversed(range(self.max_num_seqs)))
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

    def schedule(self) -> list[Chunk] | None:
        """The chunks of one step: decodes, then chunks of prompts; empty when nothing can run.

        None: blocks are lacking, and a launched step may write to a victim's. Collect that first.
        """
        if (scheduled := self._schedule_decodes()) is None:
            return None
        chunks, prefilling = scheduled
        if prefilling is not None or self.waiting:
            num_tokens = self.max_num_batched_tokens - len(chunks)
            if chunks:
                num_tokens = min(num_tokens, self.prefill_chunk_tokens)
            self._schedule_prompts(prefilling, chunks, num_tokens)
        self.is_blocked = not chunks
        return chunks

    def launched(self, chunks: list[Chunk]) -> None:
        """The device computes `chunks` from here on: the next step goes on behind them."""
        self.num_in_flight += 1
        for seq, _, end, samples in chunks:
            seq.num_launched_tokens = end
            seq.in_flight += 1
            if samples and end + 1 < seq.max_num_tokens:
                seq.token_ids.append(PENDING)

    def collected(self, chunks: list[Chunk], *, computed: bool = True) -> None:
        """The step of `chunks` is over: nothing of it is written any more.

        `computed`: it went well, so the blocks that it filled are published.
        """
        self.num_in_flight -= 1
        block_size, running = self.pool.block_size, SequenceStatus.RUNNING
        for seq, _, end, _ in chunks:
            seq.in_flight -= 1
            if computed and seq.status is running:
                seq.num_computed_tokens = end
                if end // block_size > seq.num_published_blocks:
                    publish_full_blocks(seq, self.pool)
        self._let_go()

    def all_collected(self) -> None:
        """No launched step is under way any more, whatever has become of it."""
        self.num_in_flight = 0
        for seq in chain(self.running.values(), self.parked.values(), self.leaving):
            seq.in_flight = 0
        self._let_go()

    def finish(self, seq: Sequence) -> None:
        """End a waiting or running sequence; a prefill_only one keeps its blocks until `drop`."""
        if not self._stop_running(seq):
            del self.waiting[seq.request_id]
            self._num_blocks_awaited = 0
        seq.status = SequenceStatus.FINISHED
        if seq.prefill_only and seq.block_table:
            self.parked[seq.request_id] = seq
        else:
            self._give_back_when_written(seq)

    def drop(self, seq: Sequence, *, quarantined: bool = False) -> None:
        """Forget a sequence in any state; `quarantined`: writes into its reservation may land."""
        self._stop_running(seq)
        for group in (self.waiting, self.remote, self.parked):
            group.pop(seq.request_id, None)
        is_reserved = seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
        seq.status = SequenceStatus.FINISHED
        if is_reserved:
            self._give_back(seq, quarantined=quarantined)
        else:
            self._give_back_when_written(seq)
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
        """As `PrefixPulls.reserve`; None also when it would starve others, as in `reserve`."""
        num_spare_blocks = self.num_watermark_blocks + self._num_blocks_awaited
        return self.pulls.reserve(seq, num_blocks, num_spare_blocks)

    def end_pull(self, request_id: str, *, proven: bool, quarantined: bool = False) -> bool:
        """As `PrefixPulls.end`."""
        has_ended = self.pulls.end(request_id, proven=proven, quarantined=quarantined)
        self.is_blocked = self.is_blocked and not has_ended
        return has_ended

    def admit(self, seq: Sequence) -> None:
        """The reserved blocks hold the K/V of the whole prompt: run on from there."""
        del self.remote[seq.request_id]
        self._run(seq)
        seq.num_launched_tokens = seq.num_computed_tokens = seq.num_given_tokens
        publish_full_blocks(seq, self.pool)
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
        """How many leading blocks of `seq` the prefix cache holds now, at least a token less."""
        return self.pool.count_prefix(shareable_hashes(seq, self.pool))

    def _schedule_decodes(self) -> tuple[list[Chunk], Sequence | None] | None:
        """One token for everybody who has but one to compute; and who is within their prompt: one
        sequence at most, since the next starts when a step's budget outlasts it. None: as above.
        """
        chunks: list[Chunk] = []
        prefilling, block_size = None, self.pool.block_size
        new = tuple.__new__  # what a NamedTuple's constructor does, at half its cost
        for seq in list(self.running.values()):
            start, end = seq.num_launched_tokens, len(seq.token_ids)
            if end - start == 1 and start < len(seq.block_table) * block_size:
                chunks.append(new(Chunk, (seq, start, end, True)))
            elif start == end or seq.status is not SequenceStatus.RUNNING:
                continue  # its last token is drawn, or it gave its blocks to one before it
            elif end - start > 1:
                assert prefilling is None
                prefilling = seq
            else:
                has_grown = self._grow(seq)
                if has_grown is None:
                    return None
                if has_grown:
                    chunks.append(Chunk(seq, start, end, True))
        return chunks, prefilling

    def _schedule_prompts(
        self, prefilling: Sequence | None, chunks: list[Chunk], num_tokens: int
    ) -> None:
        """Add up to `num_tokens` tokens of prompts to the decodes in `chunks`."""
        budget = PromptBudget(num_tokens, self.step_cost, chunks)
        if prefilling is not None and budget.room(prefilling.num_launched_tokens) > 0:
            self._schedule_prompt(prefilling, budget, chunks)
        while budget.room(0) > 0 and (started := self._start_next()) is not None:
            self._schedule_prompt(started, budget, chunks)

    def _schedule_prompt(self, seq: Sequence, budget: PromptBudget, chunks: list[Chunk]) -> None:
        start, num_tokens = seq.num_launched_tokens, len(seq.token_ids)
        end = min(num_tokens, start + max(1, budget.room(start)))
        chunk = Chunk(seq, start, end, end == num_tokens)
        budget.take(chunk)
        chunks.append(chunk)

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
        self._run(seq)
        return seq

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.seat = self._free_seats.pop()
        self.running[seq.request_id] = seq

    def _stop_running(self, seq: Sequence) -> bool:
        """Take its seat and what it awaits from `seq`; False: it wasn't running.

        The seat may go to another at once, even while a launched step still computes `seq`: the
        device works in the order of launches.
        """
        if self.running.pop(seq.request_id, None) is None:
            return False
        self._free_seats.append(seq.seat)
        seq.seat = -1
        del seq.token_ids[seq.num_known_tokens :]
        return True

    def _take_blocks(self, seq: Sequence, num_spare_blocks: int) -> bool:
        """Blocks for every token of `seq`, leading ones from the prefix cache; all or nothing."""
        hashes = shareable_hashes(seq, self.pool)
        taken = take_blocks(self.pool, hashes, self._num_blocks(seq), num_spare_blocks)
        if taken is None:
            return False
        seq.block_table, num_cached = taken
        seq.num_published_blocks = num_cached
        seq.num_computed_tokens = num_cached * self.pool.block_size
        seq.num_launched_tokens = seq.num_computed_tokens
        if len(seq.token_ids) == seq.num_given_tokens:  # else it has drawn since
            seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def _grow(self, seq: Sequence) -> bool | None:
        """One more block for `seq`, from the youngest sequence at need. False: that was `seq`.

        None: there is none, and a step is in flight. It may write to the youngest one's blocks, or
        be the last of somebody who gives theirs back.
        """
        while (fresh := self.pool.allocate(1, after=seq.block_table[-1])) is None:
            if self.num_in_flight:
                return None
            # A prefill_only sequence is never a victim: a transfer may be reading its blocks.
            youngest = next(s for s in reversed(self.running.values()) if not s.prefill_only)
            self._stop_running(youngest)
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

    def _give_back_when_written(self, seq: Sequence) -> None:
        """At once, or when the last launched step that writes to its blocks is collected."""
        if seq.in_flight:
            self.leaving.add(seq)
        else:
            self._give_back(seq)

    def _let_go(self) -> None:
        self.is_blocked = False
        for seq in [seq for seq in self.leaving if not seq.in_flight]:
            self.leaving.remove(seq)
            self._give_back(seq)

    def _give_back(self, seq: Sequence, *, quarantined: bool = False) -> None:
        num_kept = seq.num_reserved_cached_blocks if quarantined else len(seq.block_table)
        self.pool.quarantine(seq.block_table[num_kept:])
        self.pool.free(seq.block_table[:num_kept])
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_launched_tokens = 0
        seq.num_published_blocks = 0
        seq.num_reserved_cached_blocks = 0

    def _num_blocks(self, seq: Sequence) -> int:
        return -(-len(seq.token_ids) // self.pool.block_size)

    def check_invariants(self) -> None:
        """Assert that states, tables, seats and the pool's references agree, block by block."""
        held = [*self.running.values(), *self.remote.values(), *self.parked.values(), *self.leaving]
        for seq in held:
            assert seq.num_computed_tokens <= seq.num_launched_tokens
            assert len(seq.block_table) * self.pool.block_size >= seq.num_launched_tokens
            assert seq.num_published_blocks * self.pool.block_size <= seq.num_computed_tokens
        tables = self.pulls.block_tables()
        tables += [seq.block_table for seq in held]
        self.pool.check_invariants(Counter(chain.from_iterable(tables)))
        for seq in self.running.values():
            num_pending = len(seq.token_ids) - seq.num_known_tokens
            assert seq.num_launched_tokens <= len(seq.token_ids) and num_pending <= seq.in_flight
        seats = [seq.seat for seq in self.running.values()]
        assert sorted(seats + self._free_seats) == list(range(self.max_num_seqs))
        assert len(self.running) + len(self.remote) <= self.max_num_seqs
        for group, status in (
            (self.waiting, SequenceStatus.WAITING),
            (self.running, SequenceStatus.RUNNING),
            (self.remote, SequenceStatus.WAITING_FOR_REMOTE_KVS),
            (self.parked, SequenceStatus.FINISHED),
        ):
            assert all(seq.status is status for seq in group.values())
        for seq in chain(self.waiting.values(), self.remote.values()):
            assert seq.seat < 0 and seq.in_flight == 0 and PENDING not in seq.token_ids
            assert not seq.block_table or seq.status is not SequenceStatus.WAITING
        assert all(0 < seq.in_flight <= self.num_in_flight for seq in self.leaving)
