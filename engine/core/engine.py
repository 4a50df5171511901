"""The engine: sequences in, tokens out, one step at a time, on one thread."""

import logging
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from tandem.engine.config import CHUNK_TOKENS, STEP_TOKENS, TILE_TOKENS, EngineConfig
from tandem.engine.core.runner import Runner, Step
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.outputs import (
    Backlog,
    LoadStats,
    Reservation,
    SequenceOutput,
    backlog_of,
    load_of,
)
from tandem.engine.schedule.scheduler import Scheduler
from tandem.engine.schedule.sequence import Chunk, Sequence, SequenceStatus, check_limits
from tandem.engine.schedule.step_cost import StepCost, longest_step_s
from tandem.engine.schedule.windows import NO_BLOCK, num_tokens_within
from tandem.engine.step.layer_stream import LayersListener, LayerStream
from tandem.engine.step.outcome import (
    DeviceLostError,
    SampledToken,
    ScoredPart,
    UndrawnError,
    count_step,
    count_token,
    drawn_chunks,
    fail,
    fail_undrawn,
    keep_prompt_scores,
    still_running,
)
from tandem.runtime.errors import InvalidRequestError, NotFoundError

logger = logging.getLogger(__name__)


class _FailedLaunch(NamedTuple):
    """The Step of a launch that raised. It fails when it is collected, like any other."""

    error: Exception
    seconds: float = 0.0

    def tokens(self) -> list[SampledToken]:
        raise self.error

    def prompt_scores(self) -> list[ScoredPart]:
        return []


class _Launched(NamedTuple):
    chunks: list[Chunk]
    step: Step
    stream: LayerStream | None


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one thread calls everything.

    With `overlap` a step is launched before the tokens of the one before it are collected, so that
    the device goes from one to the next. A sequence that ends is then computed for one step longer,
    whose result is discarded. A sequence under a grammar is in every other step, since the mask of
    its next token follows from the last. Any method may be called between `launch` and `collect`.

    When a step raises, its chunks are computed again one by one, so that only a sequence that fails
    alone ends. A sequence whose logits are not finite fails alone at once. DeviceLostError is
    raised: nothing can be computed again.

    `on_layers` is called within a step with the progress of prompts that have `num_layer_groups`.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.runner = runner
        self.on_layers: LayersListener | None = None
        kv_cache = runner.kv_caches[0]
        num_blocks, block_size, kind = kv_cache.num_blocks, kv_cache.block_size, runner.device_kind
        windows, longest = kv_cache.windows, runner.model_config.max_position_embeddings
        fitting = config.max_model_len
        if fitting is None:
            fitting = num_tokens_within(windows, num_blocks, longest, block_size)
        self.max_model_len = min(longest, fitting)
        self.block_pool = BlockPool(num_blocks, block_size, config.enable_prefix_cache, windows)
        self._longest_step_s = longest_step_s(config, kind)
        step_cost = StepCost(self._longest_step_s, TILE_TOKENS[kind], has_floor=kind == "gpu")
        limited = config.with_step_tokens(STEP_TOKENS[kind], CHUNK_TOKENS[kind])
        self.scheduler = Scheduler(limited, self.block_pool, step_cost)
        self.overlap = kind == "gpu" if config.overlap is None else config.overlap
        self._in_flight: deque[_Launched] = deque()  # oldest first
        self._again: deque[list[Chunk]] = deque()  # steps to launch before the scheduler's next
        self._eos_token_ids = frozenset(runner.model_config.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """True when a step would have something to do now."""
        scheduler = self.scheduler
        if self._in_flight or self._again:
            return True
        return bool(scheduler.running or scheduler.waiting) and not scheduler.is_blocked

    @property
    def num_in_flight(self) -> int:
        """The number of launched steps that are not collected."""
        return len(self._in_flight)

    def step(self) -> list[SequenceOutput]:
        """Compute the next tokens. A failing sequence ends itself, not the engine."""
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Launch the next step, and with `overlap` also the one after it."""
        self._release_layers()
        while len(self._in_flight) <= self.overlap and (chunks := self._next_chunks()):
            self._in_flight.append(self._launch(chunks))
            self.scheduler.launched(chunks)

    def collect(self) -> list[SequenceOutput]:
        """Wait for the oldest launched step, if there is one, and return its outputs."""
        self._release_layers()
        if not self._in_flight:
            return []
        scheduler, outputs = self.scheduler, []
        launched = self._in_flight.popleft()
        chunks, step, _ = launched
        try:
            tokens: SequenceOf[SampledToken] = step.tokens()
        except UndrawnError as error:
            outputs = fail_undrawn(scheduler, chunks, error)  # first: their K/V is not published
            chunks, tokens = drawn_chunks(scheduler, chunks, error)
        except DeviceLostError:
            raise
        except Exception as error:
            return self._recover(launched, error)
        scheduler.collected(chunks)
        keep_prompt_scores(step.prompt_scores())
        scheduler.step_cost.observe(chunks, step.seconds)
        return outputs + count_step(scheduler, chunks, tokens)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ContextLengthError or CapacityError if it can never fit."""
        self._accept(seq)
        self.scheduler.add(seq)

    def prefix_hit(self, seq: Sequence) -> int:
        """Count the tokens of `seq` that the prefix cache holds now; takes nothing."""
        return self.scheduler.num_prefix_blocks(seq) * self.block_pool.block_size

    def reserve(self, seq: Sequence) -> Reservation | None:
        """Reserve blocks for a remote prefill of `seq`'s prompt. None when too few are free now.

        A reservation ends by `admit`, `prefill_locally` or `abort`. Raises what `add` raises. A
        sequence that `add` queued with `on_room` may be reserved for when that is called.
        """
        if self.scheduler.waiting.get(seq.request_id) is not seq:
            self._accept(seq)
        if not self.scheduler.reserve(seq):
            return None
        table, num_cached = seq.block_table, seq.num_reserved_cached_blocks
        num_groups = self.block_pool.num_groups
        # Group by group: the blocks of a group lie side by side.
        fresh = chain(*(range(num_cached + i, len(table), num_groups) for i in range(num_groups)))
        return Reservation(
            fill=[(entry, table[entry]) for entry in fresh if table[entry] != NO_BLOCK],
            cached_ordinals=[i for i in range(num_cached) if table[i] != NO_BLOCK],
            num_cached_tokens=seq.num_cached_tokens,
        )

    def reserve_prefix(self, seq: Sequence, num_blocks: int) -> list[tuple[int, int]] | None:
        """Reserve blocks to pull the first `num_blocks` of `seq`'s prompt into, before `add`.

        Returns (ordinal, block id), by ordinals of the block table, of those that are read and that
        the prefix cache lacks; none when it lacks none. They and the blocks before them are held
        until `adopt_prefix` or `abort`. None without a prefix cache, or when there is no room now.
        Raises what `add` raises.
        """
        self._accept(seq)
        if seq.request_id in self.scheduler.pulls:
            raise InvalidRequestError(f"request {seq.request_id} is pulling its prefix already")
        return self.scheduler.reserve_prefix(seq, num_blocks)

    def adopt_prefix(self, request_id: str, *, proven: bool) -> None:
        """Let `add` find the blocks of `reserve_prefix` if they are `proven`, else free them.

        No write may land in them any more. Harmless if there are none.
        """
        self.scheduler.end_pull(request_id, proven=proven)

    def set_aside_prefix(self, request_id: str, name: str) -> None:
        """Hold the blocks of `reserve_prefix` until `adopt_prefix(name)`: a READ may still land."""
        self.scheduler.pulls.set_aside(request_id, name)

    def admit(self, request_id: str, first: "SampledToken") -> SequenceOutput:
        """Run a reserved sequence whose whole prompt's K/V is in the pool and verified.

        The output holds the first token, counted once. Raises NotFoundError.
        """
        seq = self._reserved(request_id)
        self.scheduler.admit(seq)
        return count_token(self.scheduler, seq, seq.num_tokens, first)

    def prefill_locally(
        self, request_id: str, *, quarantined: bool, first: "SampledToken | None" = None
    ) -> SequenceOutput | None:
        """Give up a remote prefill and put the sequence first in the queue. Raises NotFoundError.

        `quarantined`: writes may still land in the reserved blocks, which are withheld until
        `release_quarantined`. `first`: the first token, when the client has it already; it is kept,
        not drawn again, and the output (else None) counts it.
        """
        seq = self._reserved(request_id)
        self.scheduler.requeue(seq, quarantined=quarantined)
        if first is None:
            return None
        return count_token(self.scheduler, seq, seq.num_tokens, first)

    def release_quarantined(self, block_ids: list[int]) -> None:
        """Free quarantined blocks, in which no write can land any more."""
        self.scheduler.release_quarantined(block_ids)

    def abort(self, request_id: str, *, quarantined: bool = False) -> bool:
        """Forget a sequence in any state, exported ones too. False when there is none.

        It gives no more output. `quarantined`: writes may still land in its reserved blocks, as in
        `prefill_locally`, those of `reserve_prefix` included.
        """
        was_pulling = self.scheduler.end_pull(request_id, proven=False, quarantined=quarantined)
        seq = self.scheduler.find(request_id)
        if seq is None:
            return was_pulling
        self.scheduler.drop(seq, quarantined=quarantined)
        return True

    def fail_all(self, error: Exception) -> list[SequenceOutput]:
        """End every waiting and running sequence with an error; reservations stay.

        Waits for the launched steps and discards their results.
        """
        self._discard_launched()
        self._again.clear()
        scheduler = self.scheduler
        return fail(scheduler, [*scheduler.running.values(), *scheduler.waiting.values()], error)

    def aim(
        self,
        itl_target_ms: float | None,
        ttft_target_ms: float | None = None,
        longest_local: int = 0,
    ) -> None:
        """Keep steps with decodes under `itl_target_ms`, and report all three with the costs.

        `longest_local` has the tokens of a prompt that is never computed elsewhere.
        """
        cost, longest_s = self.scheduler.step_cost, self._longest_step_s
        cost.aim(longest_s, itl_target_ms, ttft_target_ms, longest_local)

    def load(self) -> LoadStats:
        """Return the load at this moment."""
        return load_of(self.scheduler)

    def backlog(self) -> Backlog:
        """Return the part of the load that delays a prompt."""
        return backlog_of(self.scheduler)

    def check_invariants(self) -> None:
        """Assert that every block is accounted for. Walks the whole pool: for tests and idling."""
        scheduler = self.scheduler
        scheduler.check_invariants()
        assert scheduler.num_in_flight == len(self._in_flight) <= 1 + self.overlap
        in_flight = Counter(chunk.seq for each in self._in_flight for chunk in each.chunks)
        for seq in (*scheduler.running.values(), *scheduler.exported.values(), *scheduler.draining):
            assert seq.in_flight == in_flight.pop(seq, 0)
        assert not in_flight, "a launched step computes a sequence that the scheduler does not know"

    def _accept(self, seq: Sequence) -> None:
        """Check that `seq` fits an empty engine, and set its stop tokens."""
        if self.scheduler.find(seq.request_id) is not None:
            raise InvalidRequestError(f"request {seq.request_id} is in the engine already")
        pool = self.block_pool
        check_limits(seq, self.max_model_len, pool.num_blocks, pool.block_size, pool.windows)
        # A grammar that has ended allows nothing else than the end of text.
        is_endless = seq.stop.ignore_eos and seq.matcher is None
        ends = frozenset[int]() if is_endless else self._eos_token_ids
        seq.stop_ids = ends.union(seq.stop.stop_token_ids)

    def _reserved(self, request_id: str) -> Sequence:
        seq = self.scheduler.remote.get(request_id)
        if seq is None:
            raise NotFoundError(f"request {request_id} is not waiting for a remote prefill")
        return seq

    def _next_chunks(self) -> list[Chunk] | None:
        """Return the chunks of the next step: of one to compute again, or as scheduled.

        None or empty when there are none now. Steps that are computed again do not overlap, and
        none is launched after a failed launch.
        """
        if self._in_flight and (self._again or isinstance(self._in_flight[-1].step, _FailedLaunch)):
            return None
        while self._again:
            running = SequenceStatus.RUNNING
            chunks = [chunk for chunk in self._again.popleft() if chunk.seq.status is running]
            if chunks:
                return chunks
        return self.scheduler.schedule()

    def _launch(self, chunks: list[Chunk]) -> _Launched:
        runner, held = self.runner, bool(self._in_flight)
        stream: LayerStream | None = None
        if self.on_layers is not None:
            num_layers = runner.model_config.num_layers
            stream = LayerStream(chunks, num_layers, self.on_layers, held=held) or None
        with_layers = () if stream is None else (stream, stream.boundaries)
        try:
            return _Launched(chunks, runner.launch(chunks, *with_layers), stream)
        except Exception as error:
            return _Launched(chunks, _FailedLaunch(error), stream)

    def _recover(self, failed: _Launched, error: Exception) -> list[SequenceOutput]:
        """Have the chunks of a failed step computed again, each alone. One that was alone fails.

        A sequence with announced layers fails too: they may be on their way to another worker. The
        step launched after the failed one used its results, and is computed again as it was.
        """
        chunks, _, stream = failed
        later = self._discard_launched()
        if len(chunks) == 1:
            culprits = still_running(chunks)
        else:
            announced = stream.announced if stream is not None else set()
            culprits = [seq for seq in still_running(chunks) if seq in announced]
            self._again.extend([chunk] for chunk in chunks)
            logger.warning("a step failed: its %d chunks are tried alone: %s", len(chunks), error)
        self._again.extend(later)
        return fail(self.scheduler, culprits, error) if culprits else []

    def _discard_launched(self) -> list[list[Chunk]]:
        """Wait for the launched steps, undo them, and return their chunks."""
        for launched in self._in_flight:
            with suppress(Exception):
                launched.step.tokens()
        discarded = [launched.chunks for launched in self._in_flight]
        self._in_flight.clear()
        self.scheduler.discard_launched()
        return discarded

    def _release_layers(self) -> None:
        """Announce the oldest launched step's layers: all earlier outputs have been returned."""
        if self._in_flight:
            _, step, stream = self._in_flight[0]
            if stream is not None and not isinstance(step, _FailedLaunch):
                stream.release()
