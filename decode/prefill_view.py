"""The prefill side that placements depend on: workers that take tickets, their loads, the queue."""

import logging
import time
from collections.abc import Mapping, Set

from msgspec.structs import replace

from tandem.decode.admission import (
    TYPICAL_TOKENS,
    PrefillSide,
    gets_alike,
    leaves_tickets,
    mean_tokens,
)
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.transfer_cost import TransferCost
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.outputs import Backlog, LoadStats
from tandem.engine.schedule.sequence import Sequence
from tandem.queue.prefill_queue import QueueDepth
from tandem.router.predict import PlaceLoad
from tandem.runtime.errors import ProtocolError, ServiceError
from tandem.runtime.wire.cluster_messages import Instance, LoadReport
from tandem.runtime.wire.decoding import RefusalLog, decoder
from tandem.transfer.peers import PeerHealth
from tandem.worker.worker import Worker

logger = logging.getLogger(__name__)

_decode_load = decoder(LoadReport)
_refusals = RefusalLog(logger, "a load report")
REPORT_LIFETIME_S = 2.0  # of another worker's load
NO_JOBS = QueueDepth(0, 0, 0, 0)


class PrefillView:
    """The view of one decode worker. Read on the engine thread, kept fresh on the event loop."""

    def __init__(
        self,
        worker: Worker,
        health: PeerHealth,
        instances: Mapping[str, Instance],  # prefill workers, by instance id
        metrics: DecodeMetrics,
    ) -> None:
        self._group = group = worker.group
        self.transfer_cost = TransferCost(group.layout.token_bytes * group.byte_scale)
        self._me, self._deployment = worker.node.instance_id, worker.deployment
        self._queue, self._health, self._instances = worker.queue, health, instances
        self._metrics = metrics
        self._own_prompts = worker.own_prompts
        self._side = PrefillSide(transfer=self.transfer_cost)
        self._loads: dict[str, tuple[float, LoadReport]] = {}  # by instance, when they came
        self.queue_depth = NO_JOBS
        self.num_reserved = 0  # all handoffs so far; counted on the engine thread
        self._num_reserved_tokens = 0  # of these
        self.num_taken = 0  # those that were claimed or given up; counted on the event loop
        self._num_taken_tokens = 0  # of these
        self._ticket_tokens = float(TYPICAL_TOKENS)  # the mean of the last ones

    def reserved(self, num_tokens: int) -> None:
        """Count a handoff of so many tokens to compute."""
        self.num_reserved += 1
        self._num_reserved_tokens += num_tokens
        self._ticket_tokens = mean_tokens(self._ticket_tokens, num_tokens)

    def taken(self, num_tokens: int) -> None:
        """Count the first claim of a handoff, or its end without one."""
        self.num_taken += 1
        self._num_taken_tokens += num_tokens

    def side(
        self,
        engine: Engine,
        seq: Sequence,
        num_following_tokens: int = 0,
        longest_silence_s: float = REPORT_LIFETIME_S,
    ) -> PrefillSide:
        """Return the prefill side for a prompt as of now. On the engine thread.

        So many tokens of prompts have come after it. Loads that were reported longer ago than
        `longest_silence_s` are left out.
        """
        side, depth = self._side, self.queue_depth
        helpers = self._helpers(seq.num_tokens)
        side.num_instances = len(helpers)
        oldest = time.perf_counter() - REPORT_LIFETIME_S
        side.num_silent = sum(self._loads.get(each, (oldest,))[0] < oldest for each in helpers)
        side.queue_connected = self._queue.connected
        # Counted here, not at the queue: a burst is decided before its first ticket is published.
        side.num_queued_jobs = max(depth.num_jobs, self.num_reserved - self.num_taken)
        num_unclaimed_tokens = self._num_reserved_tokens - self._num_taken_tokens
        side.num_ticket_tokens = max(depth.num_tokens, num_unclaimed_tokens)
        side.here = place_here(engine.backlog(), num_following_tokens)
        side.others = ()
        if helpers:
            just_come = self._own_prompts.just_come(seq.request_id)
            side.others = self._other_places(helpers, longest_silence_s, side.here, just_come)
        return side

    def leaves_tickets(self, load: LoadStats) -> bool:
        """Return True if another worker should take the tickets, with `load` on this one."""
        here = place_here(load)
        others = self._other_places(self._helpers(), REPORT_LIFETIME_S, here)
        return here is not None and leaves_tickets(here, others, int(self._ticket_tokens))

    def _helpers(self, num_tokens: int = 0) -> set[str]:
        """Return the other workers that take this one's tickets of prompts of `num_tokens`."""
        if not self._instances:
            return set()
        excluded = {self._me, *self._health.excluded(time.perf_counter())}
        return {
            each.instance_id
            for each in list(self._instances.values())
            if each.deployment == self._deployment
            and each.instance_id not in excluded
            and (not each.max_prompt_tokens or num_tokens <= each.max_prompt_tokens)
        }

    def _other_places(
        self,
        helpers: Set[str],
        longest_silence_s: float,
        here: PlaceLoad | None,
        just_come: tuple[int, float] = (0, 0.0),
    ) -> list[PlaceLoad]:
        """Return the load of every worker that takes tickets and is not silent.

        Frontends treat workers alike: as many tokens as just came here are taken to have come to
        each that answers as many requests.

        One that knows no costs of its own is taken to have those of this worker, whose model and
        layout it has; one that has never reported is taken to be idle.
        """
        oldest = time.perf_counter() - min(longest_silence_s, REPORT_LIFETIME_S)
        found = []
        for instance_id in helpers:
            came_at, report = self._loads.get(instance_id, (oldest, None))
            if came_at < oldest:
                continue
            place = None if report is None else PlaceLoad.of(report)
            if place is None and here is not None:
                place = _borrowing(here, instance_id, report)
            if place is not None:
                answers = report is not None and report.role != "prefill"
                is_alike = answers and gets_alike(here, place)
                found.append(place.behind(*just_come) if is_alike else place)
        return found

    def place_of(self, instance_id: str) -> PlaceLoad | None:
        """Return the load that a worker last reported."""
        _, report = self._loads.get(instance_id, (0.0, None))
        return None if report is None else PlaceLoad.of(report)

    def on_load(self, subject: str, payload: bytes) -> None:
        """Take a report of a worker's load."""
        instance_id = subject.rpartition(".")[2]
        if instance_id in self._instances:
            try:
                report = _decode_load(payload)
            except ProtocolError as error:
                _refusals.note(instance_id, error)
                return
            self._loads[instance_id] = time.perf_counter(), report
            if not self.transfer_cost.has_learned:
                self._guess_transfer()
        elif instance_id in self._loads:
            del self._loads[instance_id]

    def _guess_transfer(self) -> None:
        s_per_byte = self._group.s_per_byte
        if s_per_byte is not None:
            self.transfer_cost.begin_with(self._group.layout.token_bytes * s_per_byte)

    async def look_at_queue(self) -> None:
        """Refresh the depth of the queue; it stays as it was where the queue is out of reach."""
        if not self._instances:
            self.queue_depth = NO_JOBS
            self._metrics.queued(None)
        elif self._queue.connected:
            try:
                self.queue_depth = await self._queue.depth()
                self._metrics.queued(self.queue_depth)
            except ServiceError as error:
                logger.debug("queue depth not known: %s", error)


def _borrowing(here: PlaceLoad, instance_id: str, report: LoadReport | None) -> PlaceLoad:
    """Return the load of a worker without costs, by those of `here`."""
    if report is None:
        return PlaceLoad(here.costs, instance_id=instance_id)
    known = replace(report, costs=here.costs)
    place = PlaceLoad.of(known)
    assert place is not None
    return place


def place_here(load: Backlog, num_following_tokens: int = 0) -> PlaceLoad | None:
    """Return a worker's own load as predictions see it; None while it knows no costs."""
    if load.costs is None:
        return None
    return PlaceLoad(
        load.costs,
        load.num_decodes,
        load.decode_context,
        load.num_waiting_tokens,
        waiting_context=load.waiting_context,
        num_following_tokens=num_following_tokens,
    )
