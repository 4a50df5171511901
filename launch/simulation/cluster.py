"""A load on one layout: arrivals, the choice of a decode worker, placement, and the records."""

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from tandem.bench.client.record import RequestRecord
from tandem.decode.admission import decide, without_room
from tandem.decode.config import DisaggConfig
from tandem.decode.decision import Decision
from tandem.emulation.profile import Profile
from tandem.launch.simulation.clock import VirtualClock
from tandem.launch.simulation.handoffs import Handoffs
from tandem.launch.simulation.layout import Layout
from tandem.launch.simulation.load import PlannedLoad, PlannedRequest
from tandem.launch.simulation.worker import (
    HandoffTime,
    PlannedSequence,
    VirtualWorker,
    WorkerFigures,
)
from tandem.prefill.config import PrefillConfig
from tandem.router.config import RouterConfig
from tandem.router.policy import Router
from tandem.router.predict import PlaceLoad
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.cluster_messages import WorkerRole, role_names
from tandem.worker.load_reports import INTERVAL_S, LONG_TOKENS, MIN_INTERVAL_S, PLACING_S
from tandem.worker.roles import HANDOVER_S


def _ignore(num_finished: int) -> None:
    """Show no progress."""


def _always(record: RequestRecord) -> bool:
    """Go on."""
    return True


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything but the layout and the load."""

    figures: WorkerFigures
    disagg: DisaggConfig
    prefill: PrefillConfig
    router: RouterConfig
    handoff: HandoffTime
    seed: int
    device: Profile | None = None  # whose time steps take; None: that of the figures' costs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of a simulated run, and the seconds in which each worker computed."""

    layout: Layout
    records: list[RequestRecord]
    busy_s: list[float]


class VirtualCluster:
    """Workers of one layout behind one frontend. It runs one load, once."""

    def __init__(self, layout: Layout, setup: Setup) -> None:
        self._layout = layout
        self._config = layout.config(setup.disagg)
        self._clock = VirtualClock()
        self._block_size = setup.figures.block_size
        self._setup = setup
        self.workers = [
            self._new_worker(f"{role}-{index}", role) for index, role in enumerate(layout.roles)
        ]
        self._decoders = {each.name: each for each in self.workers if each.role != "prefill"}
        self._handoffs = Handoffs(
            [each for each in self.workers if each.role != "decode"],
            self._config,
            setup.prefill,
            setup.handoff,
            self._clock,
            self._on_token,
        )
        self._router = Router(
            layout.router(setup.router),
            random.Random(f"router/{setup.seed}"),
            clock=lambda: self._clock.now_s,
        )
        if len(self._decoders) > 1:
            for worker in self._decoders.values():
                worker.report_blocks_to(self._router.index)
        self._records: list[RequestRecord] = []
        self._requests: dict[str, PlannedRequest] = {}  # by id, until they have ended
        self._num_finished = 0
        self._is_reporting = False
        self._reported_s: dict[VirtualWorker, float] = {}
        self._reporting: set[VirtualWorker] = set()  # that are about to
        self._send_next: Callable[[], None] | None = None  # of a closed loop
        self._on_progress: Callable[[int], None] = _ignore
        self._goes_on: Callable[[RequestRecord], bool] = _always
        self._is_cut_off = False

    def run(self, load: PlannedLoad, on_progress: Callable[[int], None]) -> Outcome:
        """Send the load and wait for all answers; `on_progress` gets the number of finished ones.

        Raises ConfigError for a request that no worker can hold.
        """
        if load.plan.concurrency is None:
            return self.replay(load.arrivals(), on_progress)
        self._on_progress = on_progress
        self._report()
        self._start_closed_loop(load, load.plan.concurrency)
        return self._outcome()

    def replay(
        self,
        arrivals: Iterable[tuple[PlannedRequest, float]],
        on_progress: Callable[[int], None] = _ignore,
        goes_on: Callable[[RequestRecord], bool] = _always,
    ) -> Outcome:
        """Send requests, each at its seconds after the start, and wait for all answers.

        The run is cut off at an answer for whose record `goes_on` is False.
        """
        self._on_progress, self._goes_on = on_progress, goes_on
        self._report()
        self._await_next(iter(arrivals))
        return self._outcome()

    def _outcome(self) -> Outcome:
        self._clock.run()
        if not self._is_cut_off:
            assert self._num_finished == len(self._records), "an answer was lost"
        return Outcome(self._layout, self._records, [worker.busy_s for worker in self.workers])

    # ---- arrivals -------------------------------------------------------------------------

    def _start_closed_loop(self, load: PlannedLoad, concurrency: int) -> None:
        requests = load.requests()

        def send_next() -> None:
            if not load.is_over(self._clock.now_s) and (request := next(requests, None)):
                self._arrive(request)

        self._send_next = send_next
        for _ in range(concurrency):
            self._clock.after(0.0, send_next)

    def _await_next(self, arrivals: Iterator[tuple[PlannedRequest, float]]) -> None:
        for request, offset_s in itertools.islice(arrivals, 1):

            def arrive(request: PlannedRequest = request) -> None:
                self._arrive(request)
                self._await_next(arrivals)

            self._clock.after(max(0.0, offset_s - self._clock.now_s), arrive)

    def _arrive(self, request: PlannedRequest) -> None:
        now_s = self._clock.now_s
        record = RequestRecord(
            len(self._records),
            now_s,
            now_s,
            num_input_tokens=request.num_prompt_tokens,
            num_asked_tokens=request.num_answer_tokens,
            has_usage=True,
            unfinished=True,
        )
        self._records.append(record)
        self._send(request, record)
        self._keep_reporting()

    def _send(self, request: PlannedRequest, record: RequestRecord) -> None:
        """Choose a decode worker for a request, or for the rest of its answer."""
        self._requests[str(request.index)] = request
        for each in self._decoders.values():
            each.send_blocks()
        names = list(self._decoders)
        num_blocks = num_blocks_of(request.num_prompt_tokens, self._block_size)
        hashes = request.hashes if self._router.heeds_prefix(names) else []
        choice = self._router.choose(names, hashes, num_blocks)
        self._router.started(str(request.index), choice, num_blocks)
        worker = self._decoders[choice.instance_id]
        is_noticed = not worker.own_prompts or request.num_prompt_tokens >= LONG_TOKENS
        worker.came(str(request.index), request.num_prompt_tokens)
        worker.posted.append(request.num_prompt_tokens)
        if is_noticed:
            self._report_soon(worker)
        worker.post(partial(self._place, worker, request, record))

    # ---- one request ----------------------------------------------------------------------

    def _place(self, worker: VirtualWorker, request: PlannedRequest, record: RequestRecord) -> None:
        """Decide, then queue the sequence or reserve its blocks, as a decode worker does."""
        worker.posted.remove(request.num_prompt_tokens)
        seq = PlannedSequence.of(request, record)
        if not (worker.scheduler.has_room and self._decide(worker, request, seq)):
            seq.on_room = partial(self._decide, worker, request, seq)
            worker.scheduler.add(seq)

    def _decide(self, worker: VirtualWorker, request: PlannedRequest, seq: PlannedSequence) -> bool:
        """Return False if it should go away and has no blocks yet."""
        scheduler, is_queued = worker.scheduler, seq.on_room is not None
        num_cached = scheduler.num_prefix_blocks(seq) * self._block_size
        decision = decide(
            self._config,
            seq.num_tokens - num_cached,
            self._handoffs.side(worker, seq.request_id),
            num_cached_tokens=num_cached,
            waited_ms=(self._clock.now_s - seq.record.scheduled_s) * 1e3 if is_queued else 0.0,
        )
        if decision.place == "remote" and not scheduler.reserve(seq):
            if scheduler.returns_blocks:
                return False
            decision = without_room(decision)
        seq.place(decision)
        if decision.place == "remote":
            # Not now: that may be while a step is scheduled.
            self._clock.after(0.0, partial(self._go_away, worker, request, seq, decision))
        elif not is_queued:
            scheduler.add(seq)
        return True

    def _go_away(
        self,
        worker: VirtualWorker,
        request: PlannedRequest,
        seq: PlannedSequence,
        decision: Decision,
    ) -> None:
        self._handoffs.start(worker, seq, request, decision)
        self._own_prompt_gone(worker)

    def _on_token(self, worker: VirtualWorker, seq: PlannedSequence) -> None:
        """Note the first or the last token of a sequence."""
        if seq.prefill_only:
            if self._handoffs.computed(seq):
                self._router.prefilled(seq.request_id)
            return
        self._router.prefilled(seq.request_id)
        if seq.request_id in worker.own_prompts:
            worker.own_prompts.remove(seq.request_id)
            self._own_prompt_gone(worker)
            self._handoffs.offer()
        if len(seq.record.output_times_s) == seq.record.num_asked_tokens:
            self._finished(seq)

    def _finished(self, seq: PlannedSequence) -> None:
        record = seq.record
        record.end_s = self._clock.now_s
        record.num_output_tokens = len(record.output_times_s)
        record.num_cached_tokens = seq.num_cached_tokens
        record.unfinished = False
        self._num_finished += 1
        del self._requests[seq.request_id]
        self._router.finished(seq.request_id)
        self._on_progress(self._num_finished)
        if not self._goes_on(record):
            self._is_cut_off = True
            self._clock.stop()
        elif self._send_next is not None:
            self._clock.after(0.0, self._send_next)

    # ---- roles that change, workers that come and go --------------------------------------

    def _new_worker(self, name: str, role: WorkerRole) -> VirtualWorker:
        setup = self._setup
        worker = VirtualWorker(
            name, role, setup.figures, setup.handoff.first_guess(role), self._clock, self._on_token
        )
        worker.aim(self._config)
        if setup.device is not None:
            worker.emulate(setup.device)
        return worker

    def add(self, role: WorkerRole) -> None:
        """Let one more worker serve from now on."""
        worker = self._new_worker(f"{role}-{len(self.workers)}", role)
        self.workers.append(worker)
        self._change(worker, (), role_names(role))

    def remove(self, worker: VirtualWorker) -> None:
        """Let a worker take no more work; others resume the answers that its drain leaves."""
        self._change(worker, role_names(worker.role), (), RuntimeConfig().drain_timeout_s)

    def change_role(self, worker: VirtualWorker, role: WorkerRole) -> None:
        """Give a worker another role, as `tandem role` does; work in hand has HANDOVER_S."""
        before, worker.role = role_names(worker.role), role
        self._change(worker, before, role_names(role))

    def _change(
        self,
        worker: VirtualWorker,
        before: Collection[str],
        after: Collection[str],
        patience_s: float = HANDOVER_S,
    ) -> None:
        if "decode" in after and "decode" not in before:
            self._decoders[worker.name] = worker
            if len(self._decoders) > 1:
                for each in self._decoders.values():
                    each.report_blocks_to(self._router.index)
        if "prefill" in after and "prefill" not in before:
            self._handoffs.join(worker)
        if "decode" in before and "decode" not in after:
            del self._decoders[worker.name]
            worker.report_blocks_to(None)
            self._router.remove_instance(worker.name)
            hand_over = partial(self._hand_over, worker)
            self._clock.after(patience_s, lambda: worker.post(hand_over))
        if "prefill" in before and "prefill" not in after:
            self._handoffs.leave(worker, patience_s)

    def _hand_over(self, worker: VirtualWorker) -> None:
        """Let other workers resume the answers of one that generates no more."""
        if worker.name in self._decoders:
            return
        scheduler = worker.scheduler
        for seq in (
            *scheduler.running.values(),
            *scheduler.waiting.values(),
            *scheduler.remote.values(),
        ):
            if seq.prefill_only:
                continue
            assert isinstance(seq, PlannedSequence)
            request, record = self._requests[seq.request_id], seq.record
            num_generated = len(record.output_times_s) - self._num_before(request, record)
            self._handoffs.abandon(seq)
            scheduler.drop(seq)
            worker.own_prompts.discard(seq.request_id)
            self._router.finished(seq.request_id)
            self._send(request.resumed(num_generated, self._block_size), record)

    def _num_before(self, request: PlannedRequest, record: RequestRecord) -> int:
        """Return the tokens of the answer that a resumed request has in its prompt."""
        assert record.num_asked_tokens is not None
        return record.num_asked_tokens - request.num_answer_tokens

    # ---- reports --------------------------------------------------------------------------

    def _keep_reporting(self) -> None:
        if not self._is_reporting:
            self._is_reporting = True
            self._clock.after(INTERVAL_S, self._report_again)

    def _report_again(self) -> None:
        self._report()
        self._is_reporting = False
        if self._num_finished < len(self._records):
            self._keep_reporting()

    def _report(self) -> None:
        """Send the load of each worker to the frontend and to the decode workers."""
        self._handoffs.look()
        for worker in self.workers:
            self._report_of(worker)

    def _report_of(self, worker: VirtualWorker) -> None:
        if (report := worker.new_report()) is None:
            return
        self._reported_s[worker] = self._clock.now_s
        self._handoffs.reported(worker, PlaceLoad.of(report))
        if worker.name in self._decoders:
            self._router.update_load(report, self._block_size)

    def _own_prompt_gone(self, worker: VirtualWorker) -> None:
        if not worker.own_prompts:
            self._report_soon(worker)

    def _report_soon(self, worker: VirtualWorker) -> None:
        """Have a worker report as soon as it may: its prompts have changed."""
        if worker in self._reporting:
            return
        self._reporting.add(worker)

        def report() -> None:
            self._reporting.remove(worker)
            self._report_of(worker)

        due_s = self._reported_s.get(worker, 0.0) + MIN_INTERVAL_S
        self._clock.after(max(0.0, due_s - self._clock.now_s) + PLACING_S, report)
