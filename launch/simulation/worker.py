"""One worker under the virtual clock: the real scheduler and pool, and steps of a known length."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec

from tandem.bench.client.record import RequestRecord
from tandem.decode.admission import longest_local
from tandem.decode.config import DisaggConfig
from tandem.decode.decision import Decision
from tandem.decode.transfer_cost import BYTES_PER_S, TransferCost
from tandem.emulation.profile import Profile
from tandem.engine.config import DECODE_STEP_TOKENS, EngineConfig
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.outputs import load_of
from tandem.engine.schedule.scheduler import Scheduler
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence, SequenceStatus
from tandem.engine.schedule.step_cost import StepCost, StepWork, work_of
from tandem.launch.simulation.clock import VirtualClock
from tandem.launch.simulation.load import PlannedRequest
from tandem.router.kv_index import KvIndex
from tandem.router.predict import decode_step_s
from tandem.runtime.wire.cluster_messages import (
    KvEvent,
    LoadReport,
    StepCosts,
    WorkerRole,
    positions_of,
)
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tandem.worker.load_reports import Burst

TOKEN = 0  # every token that is drawn
EPOCH = "0"
_SAMPLING = SamplingParams()


class WorkerFigures(msgspec.Struct, frozen=True):
    """The costs and the room of one worker; all workers of a plan are alike."""

    costs: StepCosts
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 4096
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 128
    decode_step_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = DECODE_STEP_TOKENS
    overlap: bool = False  # a step is scheduled while the one before it runs
    model: str = ""  # whose worker has learned the costs; empty: not known

    def step_tokens(self, role: WorkerRole) -> int:
        """Return the most tokens in one step of a worker that begins in `role`."""
        of_any = self.costs.max_tokens
        return min(of_any, self.decode_step_tokens) if role == "decode" else of_any

    @property
    def max_tokens(self) -> int:
        """The longest prompt and answer that the pool holds."""
        return self.num_blocks * self.block_size


class HandoffTime(msgspec.Struct, frozen=True):
    """The seconds that K/V takes to another worker: for messages and proof, and for each token."""

    fixed_s: float
    per_token_s: float
    bytes_per_token: float | None = None  # of K/V; None: not known
    num_groups: int = 1  # of layers, that a step's K/V is written in as they are computed

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of K/V that is there already."""
        return self.fixed_s + num_tokens * self.per_token_s

    def landed_s(self, steps: Iterable[tuple[float, float, int]], num_present: int) -> float:
        """Return when a prompt's K/V is proven, of which the first `num_present` tokens are there.

        `steps` have begin and end of each, and the prompt's tokens by then. A step's K/V is written
        while the next one is computed, and the layers of the last one while others are.
        """
        end_s, num_groups = 0.0, self.num_groups
        for begun_s, at_s, num_tokens in steps:
            group_s = max(0, num_tokens - num_present) * self.per_token_s / num_groups
            for group in range(num_groups):
                left_s = (at_s - begun_s) * (1 - (group + 1) / num_groups)
                end_s = max(end_s, at_s - left_s) + group_s
            num_present = max(num_present, num_tokens)
        return end_s + self.fixed_s

    def first_guess(self, role: WorkerRole) -> TransferCost:
        """Return the cost that a worker begins with, and then learns from its handoffs.

        One that only decodes has measured no link.
        """
        if role == "decode" and self.bytes_per_token is not None:
            return TransferCost(self.bytes_per_token)
        return TransferCost(self.per_token_s * BYTES_PER_S)


@dataclass(slots=True, eq=False)
class PlannedSequence(Sequence):
    """A sequence that notes when its tokens come in `record`. Its tokens are dummies.

    The hashes of its prompt are given, so prompts share blocks as those of the load do.
    """

    record: RequestRecord = field(kw_only=True)
    steps: list[tuple[float, float, int]] = field(default_factory=list)  # of a remote prompt

    @staticmethod
    def of(
        request: PlannedRequest, record: RequestRecord, *, prefill_only: bool = False
    ) -> "PlannedSequence":
        return PlannedSequence(
            str(request.index),
            [request.index] * request.num_prompt_tokens,
            request.num_prompt_tokens,
            _SAMPLING,
            StopConditions(request.num_answer_tokens),
            prefill_only=prefill_only,
            block_hashes=list(request.hashes),
            record=record,
        )

    def place(self, decision: Decision) -> None:
        """Note the place of its prompt; the last one counts."""
        record = self.record
        record.prefill_place, record.prefill_reason = decision.place, decision.reason


OnToken = Callable[["VirtualWorker", PlannedSequence], None]


class VirtualWorker:
    """One worker. What is posted to it runs between two steps, as on an engine's thread.

    Where steps overlap, the next one is launched by then: what comes has to wait for it too.

    Steps of decodes alone, between which nothing could be scheduled otherwise, are gone through at
    once: `_ends_s` has the time of each, until something is posted. `on_token` is called after the
    first and after the last token of a sequence.
    """

    def __init__(
        self,
        name: str,
        role: WorkerRole,
        figures: WorkerFigures,
        transfer: TransferCost,
        clock: VirtualClock,
        on_token: OnToken,
    ) -> None:
        self.name, self.role = name, role  # which may change
        self.transfer = transfer  # as this worker learns it
        self.busy_s = 0.0
        self.own_prompts: set[str] = set()  # of answers of this worker; it computes these first
        self.posted: list[int] = []  # the tokens of prompts that it takes after the step
        self._burst = Burst()
        self._costs = costs = figures.costs
        self._overlap = figures.overlap
        self._device: Profile | None = None  # whose time steps take; None: that of the costs
        config = EngineConfig(
            max_num_seqs=figures.max_num_seqs,
            max_num_batched_tokens=figures.step_tokens(role),
            prefill_chunk_tokens=costs.max_tokens_beside,
        )
        self.pool = BlockPool(figures.num_blocks, figures.block_size)
        self.scheduler = Scheduler(config, self.pool, StepCost.known(costs))
        self._clock = clock
        self._on_token = on_token
        self._inbox: deque[Callable[[], None]] = deque()
        self._joining: list[Callable[[], None]] = []  # called when the launched step has ended
        self._is_awake = False  # it computes a step, or runs what was posted
        self._chunks: list[Chunk] = []  # of the step that is being computed
        self._ends_s: list[float] = []  # of this step, and of equal ones that follow it
        self._begun_s = 0.0  # the first of them
        self._last_s = 0.0  # the last of them takes
        self._num_wakes = 0  # a wake that was set before another one was is void
        self._has_changed = True  # since the last report
        self._stored: list[bytes] = []  # in the cache since the last event
        self._num_events = 0
        self._index: KvIndex | None = None

    def report_blocks_to(self, index: KvIndex | None) -> None:
        """Let `index` follow the prefix cache from now on; None: no index."""
        self._index = index
        self.pool.on_stored = self._stored.extend
        self.pool.on_removed = self.send_blocks

    def send_blocks(self, removed: list[bytes] | None = None) -> None:
        """Send the blocks that were stored since the last call, and then those `removed`.

        The index must have them when a worker is chosen, so they are sent together before that.
        """
        for stored, gone in ((self._stored, []), ([], removed or [])):
            if self._index is not None and (stored or gone):
                self._num_events += 1
                self._index.apply(KvEvent(self.name, EPOCH, self._num_events, stored, gone))
        self._stored.clear()

    def aim(self, config: DisaggConfig) -> None:
        """Keep steps with decodes under the target, as an engine does."""
        self.scheduler.step_cost.aim(
            self._costs.max_step_s,
            config.itl_target_ms,
            config.ttft_target_ms,
            longest_local(config),
        )

    def emulate(self, device: Profile) -> None:
        """Let steps take the time of `device`; the worker learns their costs, as an engine does."""
        self._device = device

    def came(self, request_id: str, num_tokens: int) -> None:
        """Note a prompt whose answer this worker gives."""
        self.own_prompts.add(request_id)
        self._burst.add(self._clock.now_s, request_id, num_tokens)

    def just_come(self, request_id: str) -> tuple[int, float]:
        """Return what came with this prompt, as `Burst` does."""
        return self._burst.just_come(self._clock.now_s, request_id)

    def prompt_seconds(self, num_tokens: int) -> float:
        """Return the seconds that computing a prompt's tokens takes, without its context."""
        return self._costs.prompt_s[1] * num_tokens

    def new_report(self) -> LoadReport | None:
        """Return the load at this moment; None if nothing has changed since the last call."""
        self._pass_steps()
        if not self._has_changed:
            return None
        self._has_changed = False
        report, num_new = self.report(), sum(self.posted)
        return msgspec.structs.replace(
            report,
            num_waiting_tokens=report.num_waiting_tokens + num_new,
            num_own_prompt_tokens=report.num_own_prompt_tokens + num_new,
            waiting_context=report.waiting_context + int(sum(map(positions_of, self.posted))),
        )

    def report(self) -> LoadReport:
        """Return the load between two steps, without prompts that come while one is computed."""
        return load_of(self.scheduler).report(self.name, EPOCH, self.role)

    def post(self, act: Callable[[], None]) -> None:
        """Run `act` once no step is being computed, and go on with what it brought."""
        self._inbox.append(act)
        self._has_changed = True
        if not self._is_awake:
            self._work()
        elif len(self._ends_s) > 1:
            self._pass_steps()
            del self._ends_s[1:]
            self._wake_at_the_end()

    def after_launched(self, act: Callable[[], None]) -> None:
        """Run `act` at the end of the launched step, or now, as an engine's loop does."""
        if self._overlap and self._chunks:
            self._joining.append(act)
        else:
            act()

    # ---- steps ----------------------------------------------------------------------------

    def _work(self) -> None:
        self._is_awake = self._has_changed = True
        self._chunks = chunks = self._launch() if self._overlap else []
        while self._inbox:
            self._inbox.popleft()()
        chunks = self._chunks = chunks or self._launch()
        if not chunks:
            self._is_awake = False
            return
        work, end_s = work_of(chunks), self._clock.now_s
        num_rows = sum(chunk.samples for chunk in chunks)
        self._begun_s = end_s
        for _ in range(self._num_equal_steps(chunks)):
            self._last_s = self._seconds(work, num_rows)
            end_s += self._last_s
            self._ends_s.append(end_s)
            work.decode_context += len(chunks)
        self._wake_at_the_end()

    def _launch(self) -> list[Chunk]:
        chunks = self.scheduler.schedule() or []
        if chunks:
            self.scheduler.launched(chunks)
        return chunks

    def _seconds(self, work: StepWork, num_rows: int) -> float:
        if self._device is not None:
            return self._device.step_seconds(work, num_rows, work.num_decodes)
        return step_seconds(self._costs, work)

    def _num_equal_steps(self, chunks: list[Chunk]) -> int:
        """Return how many steps compute the next token of each of `chunks`, and nothing else.

        Blocks are filled and taken, and answers end, in the last of them or later.
        """
        scheduler, block_size = self.scheduler, self.pool.block_size
        if scheduler.waiting or len(chunks) != len(scheduler.running):
            return 1
        num_steps = max(1, self.pool.num_blocks * block_size)
        for seq, start, end, _ in chunks:
            if end - start > 1 or end <= seq.num_given_tokens:
                return 1  # of a prompt
            num_left = min(
                seq.max_num_tokens - 1 - end, (seq.num_published_blocks + 1) * block_size - end + 1
            )
            num_steps = min(num_steps, num_left)
        return max(1, num_steps)

    def _wake_at_the_end(self) -> None:
        self._num_wakes += 1
        self._clock.at(self._ends_s[-1], partial(self._wake, self._num_wakes))

    def _wake(self, number: int) -> None:
        if number != self._num_wakes:
            return
        self._pass_steps()
        self._ends_s.clear()
        self._end_step()
        while self._joining:
            self._joining.pop()()
        self._work()

    def _pass_steps(self) -> None:
        """Count the tokens of steps that are over, but for the last one."""
        num_steps = min(bisect_left(self._ends_s, self._clock.now_s), len(self._ends_s) - 1)
        if num_steps <= 0:
            return
        self._has_changed = True
        ends_s, tokens = self._ends_s[:num_steps], [TOKEN] * num_steps
        del self._ends_s[:num_steps]
        for seq, _, _, _ in self._chunks:
            assert isinstance(seq, PlannedSequence)
            seq.token_ids[-1:] = [*tokens, PENDING]
            seq.num_computed_tokens += num_steps
            seq.num_launched_tokens += num_steps
            seq.record.output_times_s += ends_s
        self._chunks = [
            Chunk(seq, start + num_steps, end + num_steps, samples)
            for seq, start, end, samples in self._chunks
        ]

    def _end_step(self) -> None:
        """Count the tokens of a step, as the engine does."""
        scheduler, now_s = self.scheduler, self._clock.now_s
        self.busy_s += now_s - self._begun_s
        if self._device is not None:
            scheduler.step_cost.observe(self._chunks, self._last_s)
        scheduler.collected(self._chunks)
        for seq, _, end, samples in self._chunks:
            assert isinstance(seq, PlannedSequence)
            if seq.status is not SequenceStatus.RUNNING:
                continue  # dropped once the step was launched
            if seq.prefill_only:
                seq.steps.append((self._begun_s, now_s, end))
            if not samples:
                continue
            seq.record.output_times_s.append(now_s)
            if end + 1 < seq.max_num_tokens:
                seq.token_ids[end] = TOKEN
                if end == seq.num_given_tokens:
                    self._on_token(self, seq)
            else:
                scheduler.finish(seq)
                self._on_token(self, seq)


def step_seconds(costs: StepCosts, work: StepWork) -> float:
    """Return the time of a step, by the costs that a worker learned."""
    decodes_s = decode_step_s(costs, work.num_decodes, work.decode_context)
    if not work.num_prompt_tokens:
        return decodes_s
    per_step_s, per_token_s, per_context_s = costs.prompt_s
    prompts_s = per_step_s + per_token_s * work.num_multiplied(costs.tile_tokens)
    hidden_s = min(costs.decode_s[0], prompts_s) * costs.hidden_share if work.num_decodes else 0.0
    prompts_s += per_context_s * work.prompt_context - hidden_s
    return max(decodes_s + prompts_s, costs.prompt_floor_s)
