"""Which tokens the next step computes. Pure: moves sequences and blocks, never a tensor.

add ─▶ waiting ─start─▶ running ─finish─▶ gone, or exported until drop (prefill_only)
          ▲  ▲────preempt───┘ ▲
          │                   │ admit
  requeue └──── remote ───────┘        reserve ─▶ remote
"""

from collections import OrderedDict
from itertools import chain, islice

from tandem.engine.config import CHUNK_TOKENS, EngineConfig
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.block_tables import cover_chunk, extend_table, free_passed
from tandem.engine.schedule.invariants import check_scheduler
from tandem.engine.schedule.prefix import PrefixPulls, publish_full_blocks, shareable_hashes
from tandem.engine.schedule.sequence import (
    MAX_FORCED_TOKENS,
    PENDING,
    Chunk,
    Sequence,
    SequenceStatus,
    one_by_one,
)
from tandem.engine.schedule.sequence_blocks import free_blocks, num_missing, num_needed, take_blocks
from tandem.engine.schedule.step_cost import PromptBudget, StepCost
from tandem.runtime.wire.block_hash import num_blocks_of

WATERMARK_FRACTION = 0.01  # of the pool, left free for running sequences to grow into
MAX_QUARANTINED = 0.25  # of the pool; then no blocks are reserved for writes of others


class Scheduler:
    """Continuous batching under a token budget: decodes first, then prompts in order of arrival.

    A sequence that starts gets blocks for every token it has; only decoding takes more. When
    there are none left the youngest sequence gives its blocks back and is computed again later.
    Where layers have windows, whose blocks come back as a prompt is computed, each of its chunks
    takes the blocks for its own tokens.

    A step may be launched before the one before it is collected. Scheduling follows the launched
    steps. Hashes are published, and blocks freed, as steps are collected.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, step_cost: StepCost) -> None:
        assert config.max_num_batched_tokens is not None
        self.pool = pool
        self.step_cost = step_cost
        # A decode step has a token for each batch row: there are no more rows than its tokens.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.prefill_chunk_tokens = config.prefill_chunk_tokens or CHUNK_TOKENS["cpu"]
        self.num_watermark_blocks = max(1, int(pool.num_blocks * WATERMARK_FRACTION))
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: dict[str, Sequence] = {}  # oldest first
        self.remote: dict[str, Sequence] = {}
        self.exported: dict[str, Sequence] = {}  # finished, but a transfer may read their blocks
        self.draining: set[Sequence] = set()  # gone, but a launched step may write to their blocks
        self.pulls = PrefixPulls(pool)
        self.num_in_flight = 0  # steps launched and not collected
        self.num_preemptions = 0
        self.is_blocked = False  # the last schedule was empty, and will be until something changes
        self._free_rows = list(reversed(range(self.max_num_seqs)))
        self._num_blocks_awaited = 0  # of the head of the queue, which last found too few
        self._num_returns_seen = -1  # the pool's num_returns at that time
        self._num_returns_refused = -1  # the same when one that was told of room found too few

    @property
    def has_row(self) -> bool:
        """True while fewer sequences are here than there are batch rows."""
        return len(self.running) + len(self.remote) + len(self.waiting) < self.max_num_seqs

    @property
    def has_room(self) -> bool:
        """True while one that comes now has a batch row, and none waits for room before it."""
        return self.has_row and all(seq.on_room is None for seq in self.waiting.values())

    @property
    def returns_blocks(self) -> bool:
        """True while some hold blocks and will give them back: as many as any sequence needs.

        Not where layers have windows: a prompt computed here needs fewer than one from elsewhere.
        """
        is_soon = self._may_reserve and not self.pool.has_windows
        return is_soon and bool(self.running or self.remote)

    @property
    def _may_reserve(self) -> bool:
        return self.pool.num_quarantined <= MAX_QUARANTINED * self.pool.num_blocks

    def find(self, request_id: str) -> Sequence | None:
        for group in (self.running, self.waiting, self.remote, self.exported):
            if request_id in group:
                return group[request_id]
        return None

    def add(self, seq: Sequence) -> None:
        self.waiting[seq.request_id] = seq
        self.is_blocked = False

    def schedule(self) -> list[Chunk] | None:
        """Return the chunks of one step: decodes, then prompts. Empty when nothing can run.

        None when blocks are short and a launched step may write to a victim's: collect it first.
        """
        if self.waiting:
            self._offer_room()
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
        """Count `chunks` as launched: the next step follows them."""
        self.num_in_flight += 1
        for seq, _, end, samples in chunks:
            seq.num_launched_tokens = end
            seq.in_flight += 1
            if samples and end + 1 < seq.max_num_tokens:
                seq.token_ids.append(PENDING)

    def collected(self, chunks: list[Chunk]) -> None:
        """Count the step of `chunks` as computed, and publish the blocks that it filled."""
        self.num_in_flight -= 1
        block_size, running = self.pool.block_size, SequenceStatus.RUNNING
        for seq, _, end, _ in chunks:
            seq.in_flight -= 1
            if seq.status is running:
                seq.num_computed_tokens = end
                if end // block_size > seq.num_published_blocks:
                    publish_full_blocks(seq, self.pool)
                    if self.pool.has_windows:
                        free_passed(self.pool, seq)
        self._free_drained()

    def put_off(self, seq: Sequence, end: int) -> None:
        """Take back the last token of a chunk that drew none: the next step computes it again."""
        if seq.status is SequenceStatus.RUNNING:
            seq.num_launched_tokens = end - 1
            del seq.token_ids[seq.num_known_tokens :]

    def discard_launched(self) -> None:
        """Undo the launches of all steps that are not collected; none of them writes any more."""
        self.num_in_flight = 0
        for seq in chain(self.running.values(), self.exported.values(), self.draining):
            seq.in_flight = 0
        for seq in self.running.values():
            seq.num_launched_tokens = seq.num_computed_tokens
            del seq.token_ids[seq.num_known_tokens :]
        self._free_drained()

    def finish(self, seq: Sequence) -> None:
        """End a waiting or running sequence; a prefill_only one keeps its blocks until `drop`."""
        seq.on_room = None
        if not self._stop_running(seq):
            del self.waiting[seq.request_id]
            self._num_blocks_awaited = 0
        seq.status = SequenceStatus.FINISHED
        if seq.prefill_only and seq.block_table:
            self.exported[seq.request_id] = seq
        else:
            self._free_when_idle(seq)

    def drop(self, seq: Sequence, *, quarantined: bool = False) -> None:
        """Forget a sequence in any state.

        `quarantined`: writes into its reserved blocks may still land.
        """
        seq.on_room = None
        self._stop_running(seq)
        for group in (self.waiting, self.remote, self.exported):
            group.pop(seq.request_id, None)
        is_reserved = seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
        seq.status = SequenceStatus.FINISHED
        if is_reserved:
            free_blocks(self.pool, seq, quarantined=quarantined)
        else:
            self._free_when_idle(seq)
        self._num_blocks_awaited = 0
        self.is_blocked = False

    def reserve(self, seq: Sequence) -> bool:
        """Hold the blocks of `seq`'s prompt and a batch row until `admit`, `requeue` or `drop`.

        One that is queued has heard by `on_room` that it has a row, and leaves the queue.
        False when this would starve running sequences or those that arrived earlier, and while much
        of the pool is in quarantine: a network that fails must not take all of it.
        """
        has_row = seq.request_id in self.waiting or self.has_row
        if not (has_row and self._may_reserve):
            return False
        if not take_blocks(self.pool, seq, self._num_spare_blocks, is_remote=True):
            return False
        seq.num_reserved_cached_blocks = seq.num_published_blocks * self.pool.num_groups
        seq.status = SequenceStatus.WAITING_FOR_REMOTE_KVS
        self.waiting.pop(seq.request_id, None)
        self.remote[seq.request_id] = seq
        return True

    def reserve_prefix(self, seq: Sequence, num_blocks: int) -> list[tuple[int, int]] | None:
        """Reserve as `PrefixPulls.reserve` does; None also when it would starve other sequences."""
        return self.pulls.reserve(seq, num_blocks, self._num_spare_blocks)

    def end_pull(self, request_id: str, *, proven: bool, quarantined: bool = False) -> bool:
        """End a pull as `PrefixPulls.end` does."""
        has_ended = self.pulls.end(request_id, proven=proven, quarantined=quarantined)
        self.is_blocked = self.is_blocked and not has_ended
        return has_ended

    def admit(self, seq: Sequence) -> None:
        """Run `seq`, whose reserved blocks hold the K/V of its whole prompt."""
        del self.remote[seq.request_id]
        self._run(seq)
        seq.num_launched_tokens = seq.num_computed_tokens = seq.num_given_tokens
        publish_full_blocks(seq, self.pool)
        free_passed(self.pool, seq)
        self.is_blocked = False

    def requeue(self, seq: Sequence, *, quarantined: bool) -> None:
        """Put a sequence with a reservation at the head of the queue, without its blocks."""
        del self.remote[seq.request_id]
        free_blocks(self.pool, seq, quarantined=quarantined)
        self._wait_first(seq)

    def release_quarantined(self, block_ids: list[int]) -> None:
        """Free quarantined blocks, in which no write can land any more."""
        self.pool.release_quarantined(block_ids)
        self.is_blocked = False

    def num_prefix_blocks(self, seq: Sequence) -> int:
        """Count the leading blocks of `seq` in the prefix cache; that of its last token is none."""
        return self.pool.count_prefix(shareable_hashes(seq, self.pool))

    def _schedule_decodes(self) -> tuple[list[Chunk], Sequence | None] | None:
        """Return the chunks of decoding sequences, and the sequence that is within its prompt.

        There is at most one of these: the next starts in a step whose budget outlasts it. Tokens
        that a grammar forced have a chunk each, and there are no more chunks than batch rows. None
        as in `schedule`.
        """
        chunks: list[Chunk] = []
        prefilling, block_size, num_groups = None, self.pool.block_size, self.pool.num_groups
        num_spare_rows = self.max_num_seqs - len(self.running)
        new = tuple.__new__  # what a NamedTuple's constructor does, at half its cost
        for seq in list(self.running.values()):
            start, end = seq.num_launched_tokens, len(seq.token_ids)
            if seq.matcher is not None and seq.token_ids[-1] == PENDING:
                continue  # its next mask follows from the token that is being drawn
            if end - start == 1 and start * num_groups < len(seq.block_table) * block_size:
                chunks.append(new(Chunk, (seq, start, end, True)))
            elif start == end or seq.status is not SequenceStatus.RUNNING:
                continue  # its last token is being drawn, or it was preempted in this loop
            elif start < seq.num_given_tokens or end - start > MAX_FORCED_TOKENS:
                assert prefilling is None
                prefilling = seq
            else:
                end = min(end, start + 1 + num_spare_rows)
                has_grown = self._grow(seq, end)
                if has_grown is None:
                    return None
                if has_grown:
                    num_spare_rows -= end - start - 1
                    chunks += one_by_one(seq, start, end)
        return chunks, prefilling

    def _schedule_prompts(
        self, prefilling: Sequence | None, chunks: list[Chunk], num_tokens: int
    ) -> None:
        """Add chunks of prompts, of up to `num_tokens` tokens, to the decodes in `chunks`."""
        budget = PromptBudget(num_tokens, self.step_cost, chunks)
        if prefilling is not None:  # decodes leave it a token: there is one for each batch row
            self._schedule_prompt(prefilling, budget, chunks)
        while budget.room(0) > 0 and (started := self._start_next()) is not None:
            self._schedule_prompt(started, budget, chunks)

    def _schedule_prompt(self, seq: Sequence, budget: PromptBudget, chunks: list[Chunk]) -> None:
        start, num_tokens = seq.num_launched_tokens, len(seq.token_ids)
        end = min(num_tokens, start + max(1, budget.room(start)))
        if self.pool.has_windows:
            num_spare_blocks = self.num_watermark_blocks if len(self.running) > 1 else 0
            end = cover_chunk(self.pool, seq, end, num_spare_blocks)
        chunk = Chunk(seq, start, end, end == num_tokens)
        budget.take(chunk)
        if end > start:
            chunks.append(chunk)

    def _offer_room(self) -> None:
        """Tell those in the queue that wait for room of a batch row, until one lacks blocks."""
        is_refused = self._num_returns_refused == self.pool.num_returns
        if is_refused and (self.running or self.remote):
            return
        num_free = self.max_num_seqs - len(self.running) - len(self.remote)
        for seq in list(islice(self.waiting.values(), num_free)):
            if seq.on_room is not None:
                if not seq.on_room():
                    self._num_returns_refused = self.pool.num_returns
                    return
                seq.on_room = None

    def _start_next(self) -> Sequence | None:
        """Run the head of the queue and return it. None without a batch row or blocks for it."""
        if not self.waiting or len(self.running) + len(self.remote) >= self.max_num_seqs:
            return None
        seq = next(iter(self.waiting.values()))
        if seq.on_room is not None:
            return None
        if self._num_blocks_awaited and self._num_returns_seen == self.pool.num_returns:
            return None
        num_spare_blocks = self.num_watermark_blocks if self.running else 0
        if not take_blocks(self.pool, seq, num_spare_blocks):
            self._num_blocks_awaited = num_needed(self.pool, seq)
            self._num_returns_seen = self.pool.num_returns
            return None
        self._num_blocks_awaited = 0
        del self.waiting[seq.request_id]
        self._run(seq)
        return seq

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.batch_row = self._free_rows.pop()
        self.running[seq.request_id] = seq

    def _stop_running(self, seq: Sequence) -> bool:
        """Take its batch row and its pending tokens from `seq`. False: it was not running.

        The row may go to another sequence at once, even while a launched step still computes `seq`:
        the device works in the order of launches.
        """
        if self.running.pop(seq.request_id, None) is None:
            return False
        self._free_rows.append(seq.batch_row)
        seq.batch_row = -1
        del seq.token_ids[seq.num_known_tokens :]
        return True

    @property
    def _num_spare_blocks(self) -> int:
        """The blocks that a reservation leaves over: to grow into, and for prompts before it."""
        num_spare_blocks = self.num_watermark_blocks + self._num_blocks_awaited
        if self.pool.has_windows:
            for seq in self.running.values():
                if seq.num_launched_tokens + 1 < len(seq.token_ids):  # it is within its prompt
                    num_spare_blocks += num_missing(self.pool, seq, seq.block_table)
        return num_spare_blocks

    def _grow(self, seq: Sequence, num_tokens: int) -> bool | None:
        """Give `seq` blocks for `num_tokens`, if need be by preempting the youngest sequences.

        False when that was `seq` itself. None when there is no block and a step is in flight, which
        may write to the youngest sequence's blocks, or free others when it is collected.
        """
        table, start = seq.block_table, seq.num_launched_tokens
        num_ordinals = num_blocks_of(num_tokens, self.pool.block_size)
        if len(table) >= num_ordinals * self.pool.num_groups:
            return True
        while not extend_table(self.pool, table, num_ordinals, start):
            if self.num_in_flight:
                return None
            # A prefill_only sequence is never a victim: a transfer may be reading its blocks.
            youngest = next(s for s in reversed(self.running.values()) if not s.prefill_only)
            self._stop_running(youngest)
            free_blocks(self.pool, youngest)
            self._wait_first(youngest)
            self.num_preemptions += 1
            if youngest is seq:
                return False
        return True

    def _wait_first(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        self.waiting[seq.request_id] = seq
        self.waiting.move_to_end(seq.request_id, last=False)
        self._num_blocks_awaited = 0
        self.is_blocked = False

    def _free_when_idle(self, seq: Sequence) -> None:
        """Free its blocks now, or when the last launched step that writes to them is collected."""
        if seq.in_flight:
            self.draining.add(seq)
        else:
            free_blocks(self.pool, seq)

    def _free_drained(self) -> None:
        self.is_blocked = False
        for seq in [seq for seq in self.draining if not seq.in_flight]:
            self.draining.remove(seq)
            free_blocks(self.pool, seq)

    def check_invariants(self) -> None:
        """Assert that states, tables, batch rows and the pool's references agree."""
        check_scheduler(self, self._free_rows)
