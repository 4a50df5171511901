"""Which decode worker serves a request: the cheapest by prefix overlap and load. Pure."""

import random
from dataclasses import dataclass, field

from tandem.router.config import RouterConfig
from tandem.router.kv_index import KvIndex
from tandem.runtime.messages import LoadReport


@dataclass(slots=True, frozen=True)
class RoutingDecision:
    """Where a request goes, and why."""

    instance_id: str
    num_overlap_blocks: int
    reason: str


@dataclass(slots=True)
class _Request:
    """One of our own requests on an instance."""

    instance_id: str
    num_blocks: int
    num_pending_blocks: int  # still to be prefilled


@dataclass(slots=True)
class _Load:
    """An instance's load: its last report, moved on by what we sent it and got back since."""

    num_requests: int = 0
    active_blocks: int = 0
    pending_blocks: int = 0
    reported_active_blocks: int = 0
    reported_pending_blocks: int = 0
    active_blocks_at_report: int = 0
    pending_blocks_at_report: int = 0

    def active(self) -> int:
        """Blocks of running requests, everybody's."""
        since = self.active_blocks - self.active_blocks_at_report
        return max(self.reported_active_blocks + since, self.active_blocks, 0)

    def pending(self) -> int:
        """Blocks that wait to be prefilled, everybody's."""
        since = self.pending_blocks - self.pending_blocks_at_report
        return max(self.reported_pending_blocks + since, self.pending_blocks, 0)


@dataclass(slots=True)
class Router:
    """cost = overlap_weight * blocks to prefill there, with ours + blocks being decoded there.

    The lowest cost wins, then the fewest requests in flight, then chance. The caller reports each
    request it started, its first token and its end; `index` and `update_load` bring in the rest.
    """

    config: RouterConfig
    rng: random.Random = field(default_factory=random.Random)
    index: KvIndex = field(init=False)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _requests: dict[str, _Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = KvIndex(self.config.max_index_entries)

    def update_load(self, report: LoadReport, block_size: int = 16) -> None:
        """Take in a worker's own view of its load; `block_size` is its blocks' in tokens."""
        load = self._loads.setdefault(report.instance_id, _Load())
        load.reported_active_blocks = max(
            0, report.num_blocks - report.num_free_blocks - report.num_cached_blocks
        )
        load.reported_pending_blocks = report.num_waiting_tokens // block_size
        load.active_blocks_at_report = load.active_blocks
        load.pending_blocks_at_report = load.pending_blocks

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance; its requests may still finish."""
        self._loads.pop(instance_id, None)
        self.index.remove_instance(instance_id)

    def heeds_prefix(self, candidates: list[str]) -> bool:
        """Whether the hashes of a prompt can make a difference to `choose`."""
        if len(candidates) == 1 or self.config.overlap_weight == 0:
            return False
        return self.index.holds_any(candidates)

    def choose(
        self, candidates: list[str], hashes: list[bytes], num_blocks: int
    ) -> RoutingDecision:
        """The instance for a prompt of `num_blocks` blocks, full ones hashed in `hashes`.

        `hashes` may be empty where `heeds_prefix` says no.
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
        """A request was sent there."""
        pending = max(0, num_blocks - decision.num_overlap_blocks)
        self._requests[request_id] = _Request(decision.instance_id, num_blocks, pending)
        load = self._loads.setdefault(decision.instance_id, _Load())
        load.num_requests += 1
        load.active_blocks += num_blocks
        load.pending_blocks += pending

    def prefilled(self, request_id: str) -> None:
        """Its first token has come."""
        request = self._requests.get(request_id)
        if request is None:
            return
        load = self._loads.get(request.instance_id)
        if load is not None:
            load.pending_blocks = max(0, load.pending_blocks - request.num_pending_blocks)
        request.num_pending_blocks = 0

    def finished(self, request_id: str) -> None:
        """It has ended, however."""
        self.prefilled(request_id)
        request = self._requests.pop(request_id, None)
        load = self._loads.get(request.instance_id) if request else None
        if request is not None and load is not None:
            load.num_requests = max(0, load.num_requests - 1)
            load.active_blocks = max(0, load.active_blocks - request.num_blocks)
