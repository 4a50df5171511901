"""The choice of a decode worker: the cheapest by prefix overlap and load. Pure."""

import random
from dataclasses import dataclass, field

from tandem.router.config import RouterConfig
from tandem.router.kv_index import KvIndex
from tandem.runtime.messages import LoadReport


@dataclass(slots=True, frozen=True)
class RoutingDecision:
    """The instance for a request, and the reason."""

    instance_id: str
    num_overlap_blocks: int
    reason: str


@dataclass(slots=True)
class _Request:
    """One of our own requests on an instance."""

    instance_id: str
    num_blocks: int
    num_pending_blocks: int  # still to be prefilled
    num_reports: int  # of the instance, received before this request was sent


@dataclass(slots=True)
class _Load:
    """An instance's load: our own requests, and the excess of its last report over them.

    A report ages. Its excess over our prompts is partly our answers, which end with our requests.
    Reports do not tell the parts apart, so all requests of an instance are assumed to be alike.
    """

    num_requests: int = 0
    active_blocks: int = 0
    pending_blocks: int = 0
    num_reports: int = 0
    num_reported: int = 0  # of our requests, present at the last report
    num_left: int = 0  # of these, still present
    answer_blocks: float = 0.0  # of these, at the last report
    foreign_blocks: float = 0.0  # of other frontends' requests
    foreign_pending_blocks: int = 0

    def report(self, active_blocks: int, pending_blocks: int, num_requests: int) -> None:
        """Note the load of `num_requests` requests, ours among them; 0 when it is not known."""
        ours = self.num_requests / num_requests if num_requests else 0.0
        excess_blocks = max(0, active_blocks - self.active_blocks)
        self.foreign_blocks = min(excess_blocks, active_blocks * max(0.0, 1 - ours))
        self.answer_blocks = excess_blocks - self.foreign_blocks
        self.foreign_pending_blocks = max(0, pending_blocks - self.pending_blocks)
        self.num_reported = self.num_left = self.num_requests
        self.num_reports += 1

    def active(self) -> float:
        """Return the blocks of running requests, of all frontends."""
        answers = self.answer_blocks * self.num_left / max(1, self.num_reported)
        return self.active_blocks + answers + self.foreign_blocks

    def pending(self) -> int:
        """Return the blocks that wait to be prefilled, of all frontends."""
        return self.pending_blocks + self.foreign_pending_blocks


@dataclass(slots=True)
class Router:
    """The choice among instances by cost, and the state that the cost is computed from.

    cost = overlap_weight * blocks to prefill, with those of this request + blocks being decoded

    The lowest cost wins, then the fewest requests in flight, then chance. The caller reports the
    start, the first token and the end of each request; `index` and `update_load` add the rest.
    """

    config: RouterConfig
    rng: random.Random = field(default_factory=random.Random)
    index: KvIndex = field(init=False)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _requests: dict[str, _Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = KvIndex(self.config.max_index_entries)

    def update_load(self, report: LoadReport, block_size: int = 16) -> None:
        """Note a worker's own report. `block_size` is the tokens per block of the worker."""
        load = self._loads.setdefault(report.instance_id, _Load())
        load.report(
            max(0, report.num_blocks - report.num_free_blocks - report.num_cached_blocks),
            report.num_waiting_tokens // block_size,
            report.num_running + report.num_waiting,
        )

    def remove_instance(self, instance_id: str) -> None:
        """Remove an instance. Its requests may still finish."""
        self._loads.pop(instance_id, None)
        self.index.remove_instance(instance_id)

    def heeds_prefix(self, candidates: list[str]) -> bool:
        """Return True if the hashes of a prompt can make a difference to `choose`."""
        if len(candidates) == 1 or self.config.overlap_weight == 0:
            return False
        return self.index.holds_any(candidates)

    def choose(
        self, candidates: list[str], hashes: list[bytes], num_blocks: int
    ) -> RoutingDecision:
        """Return the instance for a prompt of `num_blocks` blocks; `hashes` are of the full ones.

        `hashes` may be empty where `heeds_prefix` is False.
        """
        if len(candidates) == 1:
            overlap = self.index.match(hashes, candidates).get(candidates[0], 0)
            return RoutingDecision(candidates[0], overlap, "the only instance")
        overlaps = self.index.match(hashes, candidates)
        best = min(candidates, key=lambda each: self._rank(each, overlaps, num_blocks))
        overlap = overlaps.get(best, 0)
        cost = self._cost(best, overlap, num_blocks)
        return RoutingDecision(
            best, overlap, f"cost {cost:g} of {len(candidates)}, overlap {overlap}/{num_blocks}"
        )

    def _rank(
        self, instance_id: str, overlaps: dict[str, int], num_blocks: int
    ) -> tuple[float, int, float]:
        cost = self._cost(instance_id, overlaps.get(instance_id, 0), num_blocks)
        load = self._loads.get(instance_id)
        return cost, load.num_requests if load else 0, self.rng.random()

    def _cost(self, instance_id: str, overlap: int, num_blocks: int) -> float:
        load = self._loads.get(instance_id, _Load())
        num_uncached = max(0, num_blocks - overlap)
        return self.config.overlap_weight * (num_uncached + load.pending()) + load.active()

    # ---- our own requests ---------------------------------------------------------------------

    def started(self, request_id: str, decision: RoutingDecision, num_blocks: int) -> None:
        """Note that a request was sent to the instance of `decision`."""
        pending = max(0, num_blocks - decision.num_overlap_blocks)
        load = self._loads.setdefault(decision.instance_id, _Load())
        self._requests[request_id] = _Request(
            decision.instance_id, num_blocks, pending, load.num_reports
        )
        load.num_requests += 1
        load.active_blocks += num_blocks
        load.pending_blocks += pending

    def prefilled(self, request_id: str) -> None:
        """Note that the first token of a request has come."""
        request = self._requests.get(request_id)
        if request is None:
            return
        load = self._loads.get(request.instance_id)
        if load is not None:
            load.pending_blocks = max(0, load.pending_blocks - request.num_pending_blocks)
        request.num_pending_blocks = 0

    def finished(self, request_id: str) -> None:
        """Note that a request has ended, successfully or not."""
        self.prefilled(request_id)
        request = self._requests.pop(request_id, None)
        load = self._loads.get(request.instance_id) if request else None
        if request is not None and load is not None:
            load.num_requests = max(0, load.num_requests - 1)
            load.active_blocks = max(0, load.active_blocks - request.num_blocks)
            if request.num_reports < load.num_reports:
                load.num_left = max(0, load.num_left - 1)
