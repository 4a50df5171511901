"""The prefill queue and the handoffs of simulated workers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.bench.client.record import RequestRecord
from tandem.decode.admission import (
    LOOK_AGAIN_S,
    MAX_WAYS_GIVEN,
    SOONER_HERE,
    TYPICAL_TOKENS,
    PrefillSide,
    decide_again,
    gets_alike,
    given_up,
    gives_way,
    leaves_tickets,
    may_wait_s,
    mean_tokens,
)
from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.decision import Decision
from tandem.decode.prefill_view import place_here
from tandem.engine.schedule.outputs import backlog_of
from tandem.launch.simulation.clock import VirtualClock
from tandem.launch.simulation.load import PlannedRequest
from tandem.launch.simulation.worker import (
    TOKEN,
    HandoffTime,
    OnToken,
    PlannedSequence,
    VirtualWorker,
)
from tandem.prefill.config import PrefillConfig
from tandem.prefill.job import GIVE_WAY_DELAY_S, TURN_S
from tandem.router.predict import PlaceLoad


@dataclass(slots=True, eq=False)
class Ticket:
    """One remote prefill of `seq`, whose blocks at `home` are reserved."""

    request: PlannedRequest
    home: VirtualWorker
    seq: PlannedSequence
    num_uncached: int
    queued_s: float
    worker: VirtualWorker | None = None  # that claimed it
    prompt: PlannedSequence | None = None  # at that worker
    claimed_s: float = 0.0
    computed_s: float | None = None
    first_was_sent: bool = False
    num_ways_given: int = 0  # to other tickets, as its target of the first token is lost
    has_ended: bool = False


@dataclass(slots=True)
class _Home:
    """The handoffs of one decode worker, as it counts them itself."""

    num_unclaimed: int = 0
    num_unclaimed_tokens: int = 0
    ticket_tokens: float = TYPICAL_TOKENS  # the mean of the last ones


class Handoffs:
    """The queue of tickets, and the workers that take them.

    `on_token` is called when an answer has ended that has only its first token.
    """

    def __init__(
        self,
        helpers: Sequence[VirtualWorker],
        config: DisaggConfig,
        prefill: PrefillConfig,
        time: HandoffTime,
        clock: VirtualClock,
        on_token: OnToken,
    ) -> None:
        self._config, self._prefill, self._time, self._clock = config, prefill, time, clock
        self._on_token = on_token
        self._helpers = deque(helpers)  # the longest idle first
        self._queue: dict[Ticket, None] = {}
        self._postponed: set[Ticket] = set()
        self._jobs: dict[VirtualWorker, dict[Ticket, None]] = {each: {} for each in helpers}
        self._by_prompt: dict[PlannedSequence, Ticket] = {}
        self._by_seq: dict[PlannedSequence, Ticket] = {}
        self._homes: dict[VirtualWorker, _Home] = {}
        self._reported: dict[VirtualWorker, PlaceLoad | None] = {}
        self._turned_s: dict[VirtualWorker, float] = {}  # when a busy worker last took a ticket
        self._depth = (0, 0)  # jobs and tokens, when they were last looked at

    # ---- roles that change ----------------------------------------------------------------

    def join(self, worker: VirtualWorker) -> None:
        """Let a worker take tickets."""
        self._jobs.setdefault(worker, {})
        self._helpers.appendleft(worker)
        self.offer()

    def leave(self, worker: VirtualWorker, patience_s: float) -> None:
        """Give no more tickets to a worker; those that it has not computed by then go back."""
        self._helpers.remove(worker)
        self._reported.pop(worker, None)

        def give_back() -> None:
            for ticket in list(self._jobs[worker]):
                if worker not in self._helpers:
                    self._give_up(ticket, "the prefill worker has another role now")

        self._clock.after(patience_s, give_back)

    def abandon(self, seq: PlannedSequence) -> None:
        """End the remote prefill of a sequence that its home gives away."""
        ticket = self._by_seq.get(seq)
        if ticket is not None and not ticket.has_ended:
            self._withdraw(ticket)
            self._end_job(ticket)

    # ---- the view of a decode worker ------------------------------------------------------

    @property
    def num_ticket_tokens(self) -> int:
        """The tokens of prompts in the queue, when they were last looked at."""
        return self._depth[1]

    def look(self) -> None:
        """Record the depth of the queue for the decode workers."""
        self._depth = len(self._queue), sum(ticket.num_uncached for ticket in self._queue)

    def reported(self, worker: VirtualWorker, place: PlaceLoad | None) -> None:
        """Note the load that a worker reported to the others."""
        self._reported[worker] = place

    def side(self, home: VirtualWorker, request_id: str) -> PrefillSide:
        """Return the load of `home` and of the workers that take its tickets, as reported to it.

        Prompts that just came here, but for this request's, are taken to have come to each that
        answers as many requests.
        """
        mine = self._homes.setdefault(home, _Home())
        helpers = [each for each in self._helpers if each is not home]
        here = place_here(backlog_of(home.scheduler)) if helpers else None
        return PrefillSide(
            num_instances=len(helpers),
            queue_connected=True,
            num_queued_jobs=max(self._depth[0], mine.num_unclaimed),
            num_ticket_tokens=max(self._depth[1], mine.num_unclaimed_tokens),
            here=here,
            others=self._others(home, here, home.just_come(request_id)),
            transfer=home.transfer,
        )

    def _others(
        self,
        worker: VirtualWorker,
        here: PlaceLoad | None,
        just_come: tuple[int, float] = (0, 0.0),
    ) -> list[PlaceLoad]:
        """Return the reported loads of the other workers that take tickets."""
        return [
            place.behind(*just_come)
            if each.role != "prefill" and gets_alike(here, place)
            else place
            for each in self._helpers
            if each is not worker and (place := self._reported.get(each)) is not None
        ]

    # ---- a ticket -------------------------------------------------------------------------

    def start(
        self, home: VirtualWorker, seq: PlannedSequence, request: PlannedRequest, decision: Decision
    ) -> None:
        """Put a ticket for `seq`, whose blocks are reserved, on the queue."""
        config, num_uncached = self._config, seq.num_given_tokens - seq.num_cached_tokens
        ticket = self._by_seq[seq] = Ticket(request, home, seq, num_uncached, self._clock.now_s)
        mine = self._homes[home]
        mine.num_unclaimed += 1
        mine.num_unclaimed_tokens += num_uncached
        mine.ticket_tokens = mean_tokens(mine.ticket_tokens, num_uncached)
        self._queue[ticket] = None
        claim_ms = decision.claim_timeout_ms or config.claim_timeout_ms
        longest_ms = config.handoff_timeout_of(num_uncached)
        self._clock.after(
            claim_ms / 1e3, partial(self._unclaimed, ticket, may_wait=decision.is_predicted)
        )
        self._clock.after(longest_ms / 1e3, partial(self._give_up, ticket, "deadline"))
        self._clock.after(TURN_S, self.offer)
        home.own_prompts.discard(seq.request_id)
        self.offer()

    def offer(self) -> None:
        """Give tickets to workers that have room, in order."""
        while self._queue:
            ticket = next(iter(self._queue))
            worker = next((each for each in self._helpers if self._takes(each, ticket)), None)
            if worker is None:
                return
            if not self._has_time(worker):  # it has its turn now, and the next one later
                self._turned_s[worker] = self._clock.now_s
                self._clock.after(TURN_S, self.offer)
            if self._gives_way(ticket, worker):
                self._postpone(ticket)
                continue
            self._helpers.remove(worker)
            self._helpers.append(worker)
            if worker is ticket.home:
                self._give_up(ticket, "this worker was the first to have room")
            else:
                self._claim(worker, ticket)

    def _takes(self, worker: VirtualWorker, ticket: Ticket) -> bool:
        if worker is ticket.home and self._config.policy is Policy.ALWAYS_REMOTE:
            return False
        jobs = self._jobs[worker]
        return (
            len(jobs) < self._prefill.max_batch_jobs
            and sum(job.num_uncached for job in jobs) < self._prefill.max_batch_tokens
            and (self._has_time(worker) or self._has_turn(worker, ticket))
        )

    def _has_time(self, worker: VirtualWorker) -> bool:
        return not worker.own_prompts and not self._leaves_tickets(worker)

    def _has_turn(self, worker: VirtualWorker, ticket: Ticket) -> bool:
        """Return True for a busy worker that has taken none for long while this ticket waited."""
        since_s = max(ticket.queued_s, self._turned_s.get(worker, 0.0))
        return worker is not ticket.home and self._clock.now_s >= since_s + TURN_S

    def _gives_way(self, ticket: Ticket, worker: VirtualWorker) -> bool:
        is_last = len(self._queue) == 1 or ticket.num_ways_given == MAX_WAYS_GIVEN
        if is_last or worker is ticket.home:
            return False
        place = PlaceLoad.of(worker.report())
        waited_ms = (self._clock.now_s - ticket.queued_s) * 1e3
        return place is not None and gives_way(self._config, place, ticket.num_uncached, waited_ms)

    def _postpone(self, ticket: Ticket) -> None:
        """Offer a ticket again later, as one that is delivered again."""
        del self._queue[ticket]
        self._postponed.add(ticket)
        ticket.num_ways_given += 1

        def again() -> None:
            if ticket in self._postponed:
                self._postponed.remove(ticket)
                self._queue = {ticket: None} | self._queue
                self.offer()

        self._clock.after(GIVE_WAY_DELAY_S * ticket.num_ways_given, again)

    def _leaves_tickets(self, worker: VirtualWorker) -> bool:
        here = PlaceLoad.of(worker.report())
        if here is None:
            return False
        mine = self._homes.setdefault(worker, _Home())
        return leaves_tickets(here, self._others(worker, here), int(mine.ticket_tokens))

    def _claim(self, worker: VirtualWorker, ticket: Ticket) -> None:
        del self._queue[ticket]
        self._jobs[worker][ticket] = None
        self._homes[ticket.home].num_unclaimed -= 1
        self._homes[ticket.home].num_unclaimed_tokens -= ticket.num_uncached
        ticket.worker, ticket.claimed_s = worker, self._clock.now_s
        record = RequestRecord(ticket.request.index, self._clock.now_s)
        ticket.prompt = PlannedSequence.of(ticket.request, record, prefill_only=True)
        self._by_prompt[ticket.prompt] = ticket
        worker.post(partial(self._begin, worker, ticket))

    def _begin(self, worker: VirtualWorker, ticket: Ticket) -> None:
        """Compute the prompt, after the prefix that is read from its home where that is faster."""
        scheduler, prompt = worker.scheduler, ticket.prompt
        assert prompt is not None
        block_size = worker.pool.block_size
        num_blocks = ticket.seq.num_cached_tokens // block_size
        num_missing = (num_blocks - scheduler.num_prefix_blocks(prompt)) * block_size
        read_s, compute_s = self._time.seconds(num_missing), worker.prompt_seconds(num_missing)
        if num_missing > 0 and read_s < compute_s and scheduler.reserve_prefix(prompt, num_blocks):
            self._clock.after(read_s, lambda: worker.post(partial(self._pulled, worker, ticket)))
        elif not ticket.has_ended:
            scheduler.add(prompt)

    def _pulled(self, worker: VirtualWorker, ticket: Ticket) -> None:
        prompt = ticket.prompt
        assert prompt is not None
        worker.scheduler.end_pull(prompt.request_id, proven=True)
        if not ticket.has_ended:
            worker.scheduler.add(prompt)

    def computed(self, prompt: PlannedSequence) -> bool:
        """Take the first token of a remote prefill, and send its K/V to its home.

        False for one that was given up meanwhile.
        """
        ticket = self._by_prompt.get(prompt)
        if ticket is None:
            return False
        ticket.computed_s = self._clock.now_s
        record = ticket.seq.record
        wait_s = may_wait_s(self._config, ticket.computed_s - record.scheduled_s)
        if record.output_times_s or ticket.request.num_answer_tokens == 1:
            wait_s = 0.0
        if wait_s > 0:
            self._clock.after(wait_s, partial(self._send_held, ticket))
        else:
            self._send_first(ticket)
        landed_s = self._time.landed_s(prompt.steps, ticket.seq.num_cached_tokens)
        self._clock.at(landed_s, partial(self._landed, ticket))
        return True

    def _send_held(self, ticket: Ticket) -> None:
        if not ticket.has_ended:
            self._send_first(ticket)

    def _send_first(self, ticket: Ticket) -> None:
        """Send the first token of a remote prefill, once."""
        if not ticket.first_was_sent:
            ticket.first_was_sent = True
            ticket.seq.record.output_times_s.append(self._clock.now_s)

    def _landed(self, ticket: Ticket) -> None:
        if ticket.has_ended:
            return
        assert ticket.computed_s is not None
        marks_s = {
            "queued": ticket.queued_s,
            "claimed": ticket.claimed_s,
            "computed": ticket.computed_s,
            "verified": self._clock.now_s,
        }
        stages_ms = {stage: at_s * 1e3 for stage, at_s in marks_s.items()}
        ticket.home.transfer.observe(ticket.num_uncached, stages_ms)
        self._end_job(ticket)
        ticket.home.post(partial(self._admit, ticket))

    def _requeue(self, home: VirtualWorker, seq: PlannedSequence) -> None:
        if seq.request_id in home.scheduler.remote:  # else another worker resumed it meanwhile
            home.scheduler.requeue(seq, quarantined=False)

    def _admit(self, ticket: Ticket) -> None:
        home, seq = ticket.home, ticket.seq
        if seq.request_id not in home.scheduler.remote:
            return  # another worker resumed it meanwhile
        home.scheduler.admit(seq)
        seq.token_ids.append(TOKEN)
        if seq.num_tokens < seq.max_num_tokens:
            home.after_launched(partial(self._send_first, ticket))
            return
        self._send_first(ticket)
        home.scheduler.finish(seq)
        self._on_token(home, seq)

    def _unclaimed(self, ticket: Ticket, *, may_wait: bool) -> None:
        """End the wait of a ticket, unless another worker is still predicted to be better."""
        if ticket.worker is not None or ticket.has_ended:
            return
        again = self._decided_again(ticket) if may_wait else None
        if again is None or not again.is_predicted:
            self._give_up(ticket, "no worker was free to claim it in time")
        elif again.place == "remote":
            self._clock.after(LOOK_AGAIN_S, partial(self._unclaimed, ticket, may_wait=True))
        else:
            self._give_up(ticket, SOONER_HERE)

    def _decided_again(self, ticket: Ticket) -> Decision:
        return decide_again(
            self._config,
            ticket.num_uncached,
            self.side(ticket.home, ticket.seq.request_id),
            num_cached_tokens=ticket.seq.num_cached_tokens,
            waited_ms=(self._clock.now_s - ticket.queued_s) * 1e3,
        )

    def _give_up(self, ticket: Ticket, detail: str) -> None:
        """Have the prompt computed at home, unless its first token has come."""
        if ticket.has_ended or ticket.computed_s is not None:
            return
        home = ticket.home
        self._withdraw(ticket)
        ticket.seq.place(given_up(detail))
        home.own_prompts.add(ticket.seq.request_id)
        home.post(partial(self._requeue, home, ticket.seq))
        self._end_job(ticket)

    def _withdraw(self, ticket: Ticket) -> None:
        """Take a ticket that no worker has claimed off the queue."""
        if ticket.worker is None:
            self._queue.pop(ticket, None)
            self._postponed.discard(ticket)
            mine = self._homes[ticket.home]
            mine.num_unclaimed -= 1
            mine.num_unclaimed_tokens -= ticket.num_uncached

    def _end_job(self, ticket: Ticket) -> None:
        """Free the ticket's blocks at the worker that claimed it, which may take another."""
        ticket.has_ended = True
        del self._by_seq[ticket.seq]
        worker, prompt = ticket.worker, ticket.prompt
        if worker is None or prompt is None:
            return
        del self._jobs[worker][ticket]
        del self._by_prompt[prompt]
        worker.post(lambda: worker.scheduler.drop(prompt))
        self.offer()
