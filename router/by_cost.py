"""The policy `cost`: the cheapest instance by predicted delays, with prefix overlap. Pure."""

import numpy as np

from tandem.router.decision import Compared, Known, RoutingDecision
from tandem.router.holding import num_holding
from tandem.router.load_table import Flags
from tandem.router.predict import (
    MAX_SLOWNESS,
    SHARE_TRIED,
    SHARE_UNBEARABLE,
    SURE_SHARE,
    Floats,
    delay_s,
)
from tandem.runtime.wire.messages import Routed

MARGIN = 0.1  # of a predicted delay: learned costs of alike workers differ by this


class ByCost:
    """Chooses by the loads, the index of cached blocks and the predictions for each instance.

    The cost is the predicted delay of all answers together: the time to this one's first token,
    after the prompts that came first, and what its uncached tokens delay the answers that run
    there, unless a target between tokens is kept. Where no instance has learned what its steps
    cost, the cost is overlap_weight * blocks to prefill, with those of this request + blocks being
    decoded.

    The lowest cost wins. Among equal costs, and predictions within MARGIN with no shorter prefix,
    the fewest requests in flight win, then chance. A small share of prompts tries an idle instance
    whose costs seem higher, so that these are learned anew.

    Instances without a batch row or the blocks for the prompt are passed over, and with targets
    those whose answers would miss the one between tokens with this one, and those that would need
    more than SURE_SHARE of that of the first token, as long as another one is left.

    Of workers that take tickets too, where prompts take much of the time, only as many are chosen
    from as should hold the answers (`num_holding`), those with the most of them. The others soon
    have none: there prompts are computed without answers that wait for them.
    """

    def __init__(self, known: Known) -> None:
        self._config, self._index, self._loads = known.config, known.index, known.loads
        self._known = known
        self._num_held = 0  # workers with answers, as of the last choice

    def heeds_prefix(self, candidates: list[str]) -> bool:
        if len(candidates) == 1 or self._config.overlap_weight == 0:
            return False
        return self._index.holds_any(candidates)

    def choose(
        self,
        candidates: list[str],
        hashes: list[bytes],
        num_blocks: int,
        ttft_target_s: float | None,
        named: str,
    ) -> RoutingDecision:
        if len(candidates) == 1:
            return self._only(candidates[0], num_blocks)
        loads = self._loads
        loads.arrange(candidates)
        num_cached = self._index.depths(hashes, candidates) if hashes else None
        seconds = self._seconds(candidates, num_cached, num_blocks)
        if seconds is None:
            costs, num_heeded, margin = self._blocks(num_cached, num_blocks), None, 0.0
        else:
            first_token_s, costs = seconds
            num_heeded, margin = num_cached, MARGIN
        fit = loads.fit(num_blocks)
        holding = None
        if seconds is not None:
            holding = self._holding(candidates, fit)
            targets_s = loads.ttft_targets() if ttft_target_s is None else ttft_target_s
            fit = fit if holding is None else fit & holding
            if targets_s is not None:
                in_time = fit & (first_token_s <= SURE_SHARE * targets_s)
                fit = in_time if in_time.any() else fit
        predicted_s = costs
        if 0 < np.count_nonzero(fit) < len(candidates):
            costs = np.where(fit, costs, np.inf)
        best = candidates.index(named) if named else self._best(costs, num_heeded, margin)
        if seconds is not None and holding is None and not named:
            best = self._tried(best, candidates, costs, num_cached)
        overlap = 0 if num_cached is None else int(num_cached[best])
        among = f"{len(candidates)}, overlap {overlap}/{num_blocks}"
        among += ", named by the endpoint picker" if named else ""
        cost = costs.item(best)
        if seconds is None:
            return RoutingDecision(candidates[best], overlap, f"cost {cost:g} of {among}")
        predicted_ms, cost_ms = first_token_s.item(best) * 1e3, cost * 1e3
        compared = Compared(candidates, first_token_s, predicted_s, fit)
        return RoutingDecision(
            candidates[best],
            overlap,
            _reason(predicted_ms, cost_ms, among),
            predicted_ms,
            cost_ms,
            compared=compared,
        )

    def _only(self, instance_id: str, num_blocks: int) -> RoutingDecision:
        """Return the only instance; no prefix makes a difference."""
        load = self._loads.add(instance_id)
        pace = load.pace()
        if pace is None:
            return RoutingDecision(instance_id, 0, "the only instance")
        compute_s = pace.compute_s(max(float(num_blocks * load.block_size), 1.0), 0.0)
        first_token_s = pace.wait_s + compute_s
        cost_s = delay_s(first_token_s, compute_s, pace.answers_weight)
        fits = float(load.num_fillable() >= num_blocks)
        compared = Routed([instance_id], [first_token_s], [cost_s], [fits])
        predicted_ms, cost_ms = first_token_s * 1e3, cost_s * 1e3
        reason = _reason(predicted_ms, cost_ms, f"1, overlap 0/{num_blocks}")
        return RoutingDecision(instance_id, 0, reason, predicted_ms, cost_ms, compared=compared)

    def _blocks(self, num_cached: Floats | None, num_blocks: int) -> Floats:
        """Return the costs in blocks, where no costs of steps are known."""
        pending, active = self._loads.blocks()
        num_missing = num_blocks - (0.0 if num_cached is None else num_cached)
        return self._config.overlap_weight * (np.maximum(num_missing, 0.0) + pending) + active

    def _seconds(
        self, candidates: list[str], num_cached: Floats | None, num_blocks: int
    ) -> tuple[Floats, Floats] | None:
        """Return the seconds to the first token, and the costs; None where none are known."""
        pace = self._loads.paces()
        if pace is None:
            return None
        block_size = self._loads.add(candidates[0]).block_size
        if num_cached is None:
            compute_s = pace.compute_s(max(float(num_blocks * block_size), 1.0), 0.0)
        else:
            num_missing = num_blocks - self._config.overlap_weight * num_cached
            compute_s = pace.compute_s(
                np.maximum(num_missing * block_size, 1.0), num_cached * block_size
            )
        first_token_s = pace.wait_s + compute_s
        return first_token_s, delay_s(first_token_s, compute_s, pace.answers_weight)

    def _best(self, costs: Floats, num_cached: Floats | None, margin: float) -> int:
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
        return int(good[self._known.rng.randrange(len(good)) if len(good) > 1 else 0])

    def _tried(
        self, best: int, candidates: list[str], costs: Floats, num_cached: Floats | None
    ) -> int:
        """Return `best`, or now and then an idle worker that may be as good.

        A worker that seems slow gets no prompts from which it could learn that it no longer is.
        """
        if self._known.rng.random() >= SHARE_TRIED:
            return best
        other = self._known.rng.randrange(len(candidates))
        # Those of a pause may be a thousand times too high for prompts of some lengths.
        is_bearable = costs[other] <= MAX_SLOWNESS * (1 + MARGIN) * costs[best]
        is_bearable = is_bearable or self._known.rng.random() < SHARE_UNBEARABLE
        is_idle = self._loads.add(candidates[other]).num_requests == 0
        is_as_long = num_cached is None or num_cached[other] >= num_cached[best]
        return other if is_idle and is_bearable and is_as_long else best

    def _holding(self, candidates: list[str], fit: Flags) -> Flags | None:
        """Return which instances to choose from; None: all.

        Of those that take tickets the ones with the most answers, and all others.
        """
        sharing = self._loads.sharing()
        if sharing is None:
            return None
        is_shared, num_answers, total = sharing
        load = self._loads.add(candidates[int(is_shared.argmax())])
        if load.costs is None:
            return None
        # Answers that keep a target lose nothing by standing together until the rate has faded.
        rates_of = total.rates_at if load.costs.has_target else total.rates_now
        rates = rates_of(self._known.clock())
        self._num_held = num_held = num_holding(
            load.costs, load.max_context, load.num_rows, total, rates, self._num_held
        )
        if num_held >= total.num_workers:
            return None
        ranked = np.argsort(np.where(is_shared, -num_answers, np.inf), kind="stable")
        have_room = fit[ranked]
        if not have_room[:num_held].any():
            num_held = int(have_room.argmax()) + 1 if have_room.any() else len(ranked)
        holding: Flags = is_shared == 0
        holding[ranked[:num_held]] = True
        return holding


def _reason(predicted_ms: float, cost_ms: float, among: str) -> str:
    return f"first token in {predicted_ms:.1f} ms, all answers' delays {cost_ms:.1f}; 1 of {among}"
