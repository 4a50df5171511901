"""The choice of a decode worker: the cheapest by predicted delays, with prefix overlap. Pure."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from tandem.router.config import RouterConfig
from tandem.router.kv_index import KvIndex
from tandem.router.load import InstanceLoad
from tandem.router.load_table import LoadTable, few_paces
from tandem.router.predict import MAX_SLOWNESS, Floats, Pace, delay_s, num_holding
from tandem.runtime.cluster_messages import LoadReport

# The position among the candidates, its cost, and the seconds to the first token; None: not known.
Choice = tuple[int, float, float | None]

SHARE_TRIED = 0.02  # of prompts, at an idle worker whose learned costs may be old
SHARE_UNBEARABLE = 0.1  # of these, at one that seems slower than MAX_SLOWNESS for the prompt
MARGIN = 0.1  # of a predicted delay: learned costs of alike workers differ by this


class RoutingDecision(Struct, frozen=True, gc=False):
    """The instance for a request, and the reason."""

    instance_id: str
    num_overlap_blocks: int
    reason: str
    predicted_ms: float = 0.0  # to the first token; 0: not known
    cost_ms: float = 0.0  # predicted delay of all answers together


class _Request(Struct, gc=False):
    """One of our own requests on an instance."""

    instance_id: str
    num_blocks: int
    num_pending_blocks: int  # still to be prefilled
    num_reports: int  # of the instance, received before this request was sent
    is_prefilled: bool = False


@dataclass(slots=True)
class Router:
    """The choice among instances by cost, and the state that the cost is computed from.

    The cost is the predicted delay of all answers together: the time to this one's first token,
    after the prompts that came first, and what its uncached tokens delay the answers that run
    there. Where no instance has learned what its steps cost, the cost is
    overlap_weight * blocks to prefill, with those of this request + blocks being decoded.

    The lowest cost wins. Among equal costs, and predictions within MARGIN with no shorter prefix,
    the fewest requests in flight win, then chance. A small share of prompts tries an idle instance
    whose costs seem higher, so that these are learned anew.

    With a target of the time between tokens, and prompts that come fast, only as many workers are
    chosen from as hold all answers in time, those with the most of them. The others soon have
    none: there prompts are computed without short steps.

    The caller reports the start, the first token and the end of each request; `index` and
    `update_load` add the rest.
    """

    config: RouterConfig
    rng: random.Random = field(default_factory=random.Random)
    few: int = 16  # candidates, up to which plain numbers are faster than arrays
    clock: Callable[[], float] = time.monotonic
    index: KvIndex = field(init=False)
    _loads: LoadTable = field(default_factory=LoadTable)
    _requests: dict[str, _Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = KvIndex(self.config.max_index_entries)

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
            best, load = 0, self._loads.add(candidates[0])
            overlap = self.index.match(hashes, candidates).get(candidates[0], 0) if hashes else 0
            pace = load.pace()
            if pace is None:
                cost, first_token_s = self._num_blocks_of(load, overlap, num_blocks), None
            else:
                cost, first_token_s = self._seconds_of(pace, overlap, num_blocks, load.block_size)
        elif len(candidates) <= self.few:
            matches = self.index.match(hashes, candidates) if hashes else {}
            few_cached = [matches.get(each, 0) for each in candidates]
            best, cost, first_token_s = self._choose_of_few(candidates, few_cached, num_blocks)
            overlap = few_cached[best]
        else:
            depths = self.index.depths(hashes, candidates) if hashes else None
            best, cost, first_token_s = self._choose_of_many(candidates, depths, num_blocks)
            overlap = 0 if depths is None else int(depths[best])
        among = f"{len(candidates)}, overlap {overlap}/{num_blocks}"
        if first_token_s is None:
            reason = "the only instance" if len(candidates) == 1 else f"cost {cost:g} of {among}"
            return RoutingDecision(candidates[best], overlap, reason)
        predicted_ms, cost_ms = first_token_s * 1e3, cost * 1e3
        reason = (
            f"first token in {predicted_ms:.1f} ms, all answers' delays {cost_ms:.1f}; 1 of {among}"
        )
        return RoutingDecision(candidates[best], overlap, reason, predicted_ms, cost_ms)

    def _choose_of_few(
        self, candidates: list[str], num_cached: list[int], num_blocks: int
    ) -> Choice:
        """Choose in plain numbers."""
        loads = [self._loads.add(each) for each in candidates]
        paces = few_paces(loads)
        if paces is None:
            costs = [
                self._num_blocks_of(load, num, num_blocks)
                for load, num in zip(loads, num_cached, strict=True)
            ]
            best = self._best_of_few(loads, costs, [0] * len(costs), 0.0)
            return best, costs[best], None
        block_size = loads[0].block_size
        seconds = [
            self._seconds_of(pace, num, num_blocks, block_size)
            for pace, num in zip(paces, num_cached, strict=True)
        ]
        holding, costs = self._holding_of_few(loads, num_blocks), [cost_s for cost_s, _ in seconds]
        if holding is not None:
            costs = [cost if index in holding else math.inf for index, cost in enumerate(costs)]
        best = self._best_of_few(loads, costs, num_cached, MARGIN)
        if holding is None:
            best = self._tried(best, candidates, costs, num_cached)
        return best, *seconds[best]

    def _num_blocks_of(self, load: InstanceLoad, num_cached: int, num_blocks: int) -> float:
        """Return the cost at an instance, in blocks."""
        num_missing = max(num_blocks - num_cached, 0)
        return self.config.overlap_weight * (num_missing + load.pending()) + load.active()

    def _seconds_of(
        self, pace: Pace[float], num_cached: int, num_blocks: int, block_size: int
    ) -> tuple[float, float]:
        """Return the cost at an instance, in seconds, and those to the first token."""
        num_missing = num_blocks - self.config.overlap_weight * num_cached
        compute_s = pace.compute_s(max(num_missing * block_size, 1.0), num_cached * block_size)
        first_token_s = pace.wait_s + compute_s
        return delay_s(first_token_s, compute_s, pace.num_decodes), first_token_s

    def _best_of_few(
        self, loads: list[InstanceLoad], costs: list[float], num_cached: list[int], margin: float
    ) -> int:
        """Return the position of the cheapest, or of one that is as good."""
        cheapest = costs.index(min(costs))
        limit, num_least = costs[cheapest] * (1 + margin), num_cached[cheapest]
        good = [
            index
            for index, cost in enumerate(costs)
            if cost <= limit and num_cached[index] >= num_least
        ]
        good = good or [cheapest]  # whatever the numbers are
        if len(good) > 1:
            fewest = min(loads[index].num_requests for index in good)
            good = [index for index in good if loads[index].num_requests == fewest]
        return good[self.rng.randrange(len(good)) if len(good) > 1 else 0]

    def _choose_of_many(
        self, candidates: list[str], num_cached: Floats | None, num_blocks: int
    ) -> Choice:
        """Choose in arrays. None: no candidate holds a block of the prompt."""
        self._loads.arrange(candidates)
        weight = self.config.overlap_weight
        pace = self._loads.paces()
        if pace is None:
            pending, active = self._loads.blocks()
            num_missing = num_blocks if num_cached is None else num_blocks - num_cached
            costs = weight * (np.maximum(num_missing, 0.0) + pending) + active
            best = self._best_of_many(costs, None, 0.0)
            return best, costs.item(best), None
        block_size = self._loads.add(candidates[0]).block_size
        if num_cached is None:
            compute_s = pace.compute_s(max(float(num_blocks * block_size), 1.0), 0.0)
        else:
            num_tokens = np.maximum((num_blocks - weight * num_cached) * block_size, 1.0)
            compute_s = pace.compute_s(num_tokens, num_cached * block_size)
        first_token_s = pace.wait_s + compute_s
        costs = delay_s(first_token_s, compute_s, pace.num_decodes)
        holding = self._holding_of_many(candidates, num_blocks)
        if holding is not None:
            costs = np.where(holding, costs, np.inf)
        best = self._best_of_many(costs, num_cached, MARGIN)
        if holding is None:
            best = self._tried(best, candidates, costs, num_cached)
        return best, costs.item(best), first_token_s.item(best)

    def _best_of_many(self, costs: Floats, num_cached: Floats | None, margin: float) -> int:
        """Return the position of the cheapest, or of one that is as good."""
        cheapest = costs.argmin()
        is_good = costs <= costs[cheapest] * (1 + margin)
        if num_cached is not None:
            is_good &= num_cached >= num_cached[cheapest]
        is_good[cheapest] = True  # whatever the numbers are
        good = is_good.nonzero()[0]
        if len(good) > 1:
            num_requests = self._loads.num_requests().take(good)
            good = good[num_requests == num_requests.min()]
        return int(good[self.rng.randrange(len(good)) if len(good) > 1 else 0])

    def _tried(
        self,
        best: int,
        candidates: list[str],
        costs: Sequence[float] | Floats,
        num_cached: Sequence[int] | Floats | None,
    ) -> int:
        """Return `best`, or now and then an idle worker that may be as good.

        A worker that seems slow gets no prompts from which it could learn that it no longer is.
        """
        if len(candidates) == 1 or self.rng.random() >= SHARE_TRIED:
            return best
        other = self.rng.randrange(len(candidates))
        # Those of a pause may be a thousand times too high for prompts of some lengths.
        is_bearable = costs[other] <= MAX_SLOWNESS * (1 + MARGIN) * costs[best]
        is_bearable = is_bearable or self.rng.random() < SHARE_UNBEARABLE
        is_idle = self._loads.add(candidates[other]).num_requests == 0
        is_as_long = num_cached is None or num_cached[other] >= num_cached[best]
        return other if is_idle and is_bearable and is_as_long else best

    def _holding_of_few(self, loads: list[InstanceLoad], num_blocks: int) -> set[int] | None:
        """Return the positions of the instances to choose from; None: all.

        Those with a target that have the most answers, and those without one.
        """
        ranked = [index for index, load in enumerate(loads) if load.has_target]
        costs = loads[ranked[0]].costs if ranked else None
        if costs is None:
            return None
        with_target, now_s = [loads[index] for index in ranked], self.clock()
        num_held = num_holding(
            costs,
            with_target[0].max_context,
            sum(load.rate_of_prompts(now_s) for load in with_target),
            len(ranked),
            sum(load.num_decodes for load in with_target),
            sum(load.num_decodes * load.context for load in with_target),
        )
        if num_held >= len(ranked):
            return None
        ranked.sort(key=lambda index: -loads[index].num_decodes)
        while num_held < len(ranked) and all(
            loads[index].num_fillable() < num_blocks for index in ranked[:num_held]
        ):
            num_held += 1
        return set(range(len(loads))).difference(ranked[num_held:])

    def _holding_of_many(self, candidates: list[str], num_blocks: int) -> Floats | None:
        """Return what `_holding_of_few` does, as a mask."""
        targets = self._loads.targets(self.clock())
        if targets is None:
            return None
        has_target, num_decodes, num_fillable, pressing = targets
        load = self._loads.add(candidates[int(has_target.argmax())])
        if load.costs is None:
            return None
        num_held = num_holding(load.costs, load.max_context, *pressing)
        if num_held >= pressing[1]:
            return None
        ranked = np.argsort(np.where(has_target, -num_decodes, np.inf), kind="stable")
        have_room = num_fillable[ranked] >= num_blocks
        if not have_room[:num_held].any():
            num_held = int(have_room.argmax()) + 1 if have_room.any() else len(ranked)
        holding = 1 - has_target
        holding[ranked[:num_held]] = 1.0
        return holding

    # ---- our own requests ---------------------------------------------------------------------

    def started(self, request_id: str, decision: RoutingDecision, num_blocks: int) -> None:
        """Note that a request was sent to the instance of `decision`."""
        pending = max(0, num_blocks - decision.num_overlap_blocks)
        load = self._loads.add(decision.instance_id)
        self._requests[request_id] = _Request(
            decision.instance_id, num_blocks, pending, load.num_reports
        )
        load.num_requests += 1
        load.num_prefilling += 1
        load.active_blocks += num_blocks
        load.pending_blocks += pending
        load.rate_prompt(pending * load.block_size, self.clock())
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
