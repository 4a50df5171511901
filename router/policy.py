"""The choice of a decode worker for each request, and the state that it is made from. Pure."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from tandem.router.by_cost import ByCost
from tandem.router.config import RouterConfig
from tandem.router.decision import Known, RoutingDecision, Scorer
from tandem.router.in_turn import InTurn
from tandem.router.kv_index import KvIndex
from tandem.router.load_table import LoadTable
from tandem.runtime.wire.cluster_messages import LoadReport, positions_of

# The values of `router.policy`, which RouterConfig has as well.
POLICIES: Mapping[str, Callable[[Known], Scorer]] = {"cost": ByCost, "round_robin": InTurn}


class _Request(Struct, gc=False):
    """One of our own requests on an instance."""

    instance_id: str
    num_blocks: int
    num_pending_blocks: int  # still to be prefilled
    pending_context: float  # the positions of their tokens, summed
    num_reports: int  # of the instance, received before this request was sent
    is_prefilled: bool = False


@dataclass(slots=True)
class Router:
    """The choice among instances by the policy of the config, and the state that it is made from.

    The caller reports the start, the first token and the end of each request; `index` and
    `update_load` add the rest.
    """

    config: RouterConfig
    rng: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)
    index: KvIndex = field(init=False)
    _loads: LoadTable = field(default_factory=LoadTable)
    _requests: dict[str, _Request] = field(default_factory=dict)
    _scorer: Scorer = field(init=False)

    def __post_init__(self) -> None:
        self.index = KvIndex(self.config.max_index_entries)
        self._scorer = POLICIES[self.config.policy](self)

    @property
    def loads(self) -> LoadTable:
        """The loads of all instances."""
        return self._loads

    def update_load(self, report: LoadReport, block_size: int = 16) -> None:
        """Note a worker's own report. `block_size` is the tokens per block of the worker."""
        self._loads.add(report.instance_id).report(report, block_size)
        self._loads.changed(report.instance_id)

    def remove_instance(self, instance_id: str) -> None:
        """Remove an instance. Its requests may still finish."""
        self._loads.remove(instance_id)
        self.index.remove_instance(instance_id)

    def heeds_prefix(self, candidates: list[str]) -> bool:
        """Return True if the hashes of a prompt can make a difference to `choose`."""
        return self._scorer.heeds_prefix(candidates)

    def choose(
        self,
        candidates: list[str],
        hashes: list[bytes],
        num_blocks: int,
        ttft_target_s: float | None = None,
        named: str = "",
    ) -> RoutingDecision:
        """Return the instance for a prompt of `num_blocks` blocks; `hashes` are of the full ones.

        `hashes` may be empty where `heeds_prefix` is False. `ttft_target_s` is the request's own,
        in place of that which the instances report. `named` is the candidate that another process
        has chosen, to which the others are only compared; empty without one.
        """
        return self._scorer.choose(candidates, hashes, num_blocks, ttft_target_s, named)

    # ---- our own requests ---------------------------------------------------------------------

    def started(self, request_id: str, decision: RoutingDecision, num_blocks: int) -> None:
        """Note that a request was sent to the instance of `decision`."""
        pending = max(0, num_blocks - decision.num_overlap_blocks)
        load = self._loads.add(decision.instance_id)
        num_cached, num_tokens = (num_blocks - pending) * load.block_size, pending * load.block_size
        pending_context = positions_of(num_tokens, num_cached)
        self._requests[request_id] = _Request(
            decision.instance_id, num_blocks, pending, pending_context, load.num_reports
        )
        load.num_requests += 1
        load.num_prefilling += 1
        load.active_blocks += num_blocks
        load.pending_blocks += pending
        load.pending_context += pending_context
        if load.takes_tickets:
            load.rate_prompt(num_tokens, num_cached, self.clock())
        self._loads.changed(decision.instance_id)

    def prefilled(self, request_id: str) -> None:
        """Note that the first token of a request has come."""
        request = self._requests.get(request_id)
        if request is None or request.is_prefilled:
            return
        request.is_prefilled = True
        load = self._loads.get(request.instance_id)
        if load is not None:
            load.num_prefilling = max(0, load.num_prefilling - 1)
            load.pending_blocks = max(0, load.pending_blocks - request.num_pending_blocks)
            load.pending_context = max(0.0, load.pending_context - request.pending_context)
            self._loads.changed(request.instance_id)

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
            self._loads.changed(request.instance_id)
