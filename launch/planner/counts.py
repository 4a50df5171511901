"""The number of workers that a deployment needs. Pure."""

import math
from collections import deque
from functools import partial

from tandem.config.planner import PlannerConfig
from tandem.launch.planner.demand import Demand

FULL = 0.9  # load of the fuller side, above which a worker starts at the second reading
SPARE = 0.6  # load of the fuller side, up to which a worker fewer is enough
SPARE_S = 60.0  # for so long, at each reading
AGREES = "the next reading agrees"
RETRY_S = 60.0  # from a change that failed to the next


class CountPlanner:
    """Follows whether there are too few workers or too many."""

    def __init__(self) -> None:
        self._was_full = False  # at the last reading
        self._enough: deque[tuple[float, int]] = deque()  # of SPARE_S: when, workers up to SPARE
        self._failed: tuple[float, str] | None = None

    def ended(self, now_s: float, error: str = "") -> None:
        """Take note of the end of a change; after one that failed RETRY_S pass to the next."""
        self._was_full, self._failed = False, (now_s, error) if error else None

    def wish(
        self,
        demand: Demand,
        config: PlannerConfig,
        num_workers: int,
        now_s: float,
        *,
        is_split: bool,
    ) -> tuple[int, int, str]:
        """Return how many workers more are due, or -1; the prefill workers then; and why.

        Their number doubles at most. `num_workers` has those that do not report a load yet.
        """
        if config.max_workers is None:
            return 0, 0, ""
        least = max(config.min_workers, config.min_prefill + config.min_decode if is_split else 1)
        most = max(config.max_workers, least)
        loads = partial(best_split, demand, config, is_split=is_split)
        is_full, was_full = loads(num_workers)[0] > FULL, self._was_full
        fewer = range(least, num_workers)
        enough = next((each for each in fewer if loads(each)[0] <= SPARE), num_workers)
        recent_most = self._most_of(enough, now_s)
        is_due, wish, patience = True, 0, ""
        if num_workers < least:
            wish = 1
        elif num_workers > most:
            wish = -1
        elif is_full and num_workers < most:
            more = range(1, num_workers)
            wish = next((each for each in more if loads(num_workers + each)[0] < FULL), num_workers)
            wish = min(wish, most - num_workers)
            is_due, patience = was_full, AGREES
        elif enough < num_workers:
            is_due, patience = recent_most < num_workers, f"that lasts {SPARE_S:.0f} s"
            wish = -1
        self._was_full = is_full
        if wish == 0:
            return 0, 0, f"planner.max_workers is {most}" if is_full else ""
        if self._failed is not None and now_s - self._failed[0] < RETRY_S:
            return 0, 0, f"the last change failed: {self._failed[1]}"
        then, num_prefill = loads(num_workers + wish)
        why = f"{num_workers + wish} workers would be {then:.0%} full"
        if is_due:
            return wish, num_prefill, why
        return 0, 0, f"{why}, if {patience}"

    def _most_of(self, enough: int, now_s: float) -> float:
        """Return the most workers of the readings of SPARE_S; infinite before so long is known."""
        known = self._enough
        known.append((now_s, enough))
        while len(known) > 1 and known[1][0] <= now_s - SPARE_S:
            known.popleft()
        is_long = known[0][0] <= now_s - SPARE_S
        return max(count for _, count in known) if is_long else math.inf


def best_split(
    demand: Demand, config: PlannerConfig, num_workers: int, *, is_split: bool
) -> tuple[float, int]:
    """Return the least load of so many workers, and the prefill workers of that split.

    Without a split all workers have both roles. The load is infinite for too few workers.
    """
    least, most = (config.min_prefill, num_workers - config.min_decode) if is_split else (0, 0)
    return min(
        (
            (max(demand.load(count, others), demand.held / others), count)
            for count in range(least, most + 1)
            if (others := num_workers - count) > 0
        ),
        default=(math.inf, 0),
    )
