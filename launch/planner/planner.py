"""The choice of the next change among the workers of one deployment. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.planner import PlannerConfig
from tandem.launch.planner.counts import AGREES, FULL, CountPlanner
from tandem.launch.planner.demand import Demand, WorkerLoad, demand_of, moved_s
from tandem.runtime.wire.cluster_messages import LoadReport, WorkerRole

MAX_SILENCE_S = 2.0  # of a worker, whose role is not changed then
GAIN = 0.15  # of the fuller side's load, by which a change must lower it
OVERLOADED_GAIN = 0.05  # of it, where that side cannot keep up
CLEAR_GAIN = 0.3  # of it, from which one reading is enough
RESUMED_S = 30.0  # in which computing the answers of a moved worker anew must pay


@dataclass(frozen=True, slots=True)
class Change:
    """A worker that gets a role or ends, or workers that start; and the reason in a sentence."""

    instance_id: str  # empty: workers are to be started
    role: WorkerRole
    reason: str
    kind: Literal["role", "start", "stop"] = "role"
    count: int = 1

    def __str__(self) -> str:
        if self.kind == "start":
            return f"start of {self.count}, role {self.role}"
        return f"{self.instance_id[:8]} to " + ("end" if self.kind == "stop" else self.role)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state at one decision: the sentence says what it is, and why nothing moves if so."""

    num_prefill: int
    num_generating: int
    sentence: str
    demand: Demand | None = None
    change: Change | None = None


class Planner:
    """Follows the load reports of one deployment: moves roles, starts and ends workers.

    Of two sides the fuller one counts: prompts per prefill worker, answers per worker that
    generates them, each as a share of what these can serve. A change must lower that, two readings
    in a row. Where no role helps, and the config has a bound on workers, their number changes. The
    caller makes one change at a time.
    """

    def __init__(self, config: PlannerConfig, block_size: int) -> None:
        self.config = config
        self._block_size = block_size
        self._loads: dict[str, WorkerLoad] = {}
        self._last_wish = 0  # prefill workers more or fewer, at the last reading
        self._num_known = 0
        self.counts = CountPlanner()

    def reported(self, report: LoadReport, now_s: float) -> None:
        """Take the load report of a worker."""
        load = self._loads.get(report.instance_id)
        if load is None:
            self._loads[report.instance_id] = WorkerLoad(report, now_s)
        else:
            load.add(report, now_s)

    def keep(self, instance_ids: Iterable[str]) -> None:
        """Forget all other workers."""
        kept = set(instance_ids)
        self._num_known = len(kept)
        self._loads = {each: load for each, load in self._loads.items() if each in kept}

    def decide(
        self, num_ticket_tokens: int, now_s: float, under_way: Change | None = None
    ) -> Reading:
        """Return the state now, with the next change where one is due and none is under way.

        `num_ticket_tokens` are those of prompts in the queue.
        """
        loads = {
            each: load for each, load in self._loads.items() if now_s - load.came_s <= MAX_SILENCE_S
        }
        num_prefill = sum(load.role == "prefill" for load in loads.values())
        num_generating = len(loads) - num_prefill
        counts = num_prefill, num_generating
        is_split = num_prefill > 0 or not any(load.role == "both" for load in loads.values())
        if not is_split and self.config.max_workers is None:
            return Reading(*counts, "every worker takes prompts as they come: no role to move")
        demand = demand_of(loads.values(), num_ticket_tokens, self._block_size)
        if demand is None or (is_split and not all(counts)):
            why = "no step costs are known yet" if demand is None else "one worker alone"
            return Reading(*counts, f"nothing is planned: {why}", demand)
        state = _in_words(demand, *counts)
        if under_way is not None:
            return Reading(*counts, f"{state}; under way: {under_way}", demand)
        wish, gain, why = self._wish(demand, loads, *counts) if is_split else (0, 0.0, "")
        is_second, self._last_wish = wish == self._last_wish, wish
        change = None
        if wish == 0:
            change, count_why = self._count_change(demand, loads, num_prefill, now_s, is_split)
            why = count_why or why
        elif is_second or gain >= CLEAR_GAIN:
            role = "prefill" if wish > 0 else self._generating_role(loads)
            change = Change(self._mover(loads, wish), role, "")
        else:
            why += f" if {AGREES}"
        sentence = f"{state}; {why}" if why else state
        if change is None:
            return Reading(*counts, sentence, demand)
        change = replace(change, reason=sentence)
        return Reading(*counts, f"{sentence}: {change}", demand, change)

    def _count_change(
        self,
        demand: Demand,
        loads: Mapping[str, WorkerLoad],
        num_prefill: int,
        now_s: float,
        is_split: bool,
    ) -> tuple[Change | None, str]:
        """Return the start or the end of a worker where one is due, and why."""
        num_workers = max(len(loads), self._num_known)
        wish, then, why = self.counts.wish(
            demand, self.config, num_workers, now_s, is_split=is_split
        )
        if wish == 0:
            return None, why
        is_prefill = then > num_prefill if wish > 0 else then < num_prefill
        role = "prefill" if is_prefill else self._generating_role(loads)
        if wish > 0:
            return Change("", role, "", "start", wish), why
        return Change(self._mover(loads, -1 if is_prefill else 1), role, "", "stop"), why

    def _wish(
        self,
        demand: Demand,
        loads: Mapping[str, WorkerLoad],
        num_prefill: int,
        num_generating: int,
    ) -> tuple[int, float, str]:
        """Return how many prefill workers more there should be, 1, 0 or -1; the gain, and why.

        The gain is the share of the fuller side's load that the best split takes off.
        """
        config, num_workers = self.config, num_prefill + num_generating
        now = demand.load(num_prefill, num_generating)
        if now <= FULL:
            return 0, 0.0, "both sides have room"
        spare = int(num_workers - max(config.min_decode, demand.held))
        most = max(num_prefill, spare)
        least = min(num_prefill, config.min_prefill)
        best = min(
            range(least, most + 1),
            key=lambda count: (demand.load(count, num_workers - count), abs(count - num_prefill)),
        )
        then = demand.load(best, num_workers - best)
        if best > num_prefill:
            # answers of the worker that moves are computed anew
            report = loads[self._mover(loads, 1)].report
            cost_s = 0.0 if report.costs is None else moved_s(report, report.costs)
            then += cost_s / RESUMED_S / best
        gain = 1 - then / now
        if gain < (GAIN if now <= 1 else OVERLOADED_GAIN):
            return 0, gain, f"no split of {num_workers} workers is clearly better"
        split = f"{best} prefill and {num_workers - best} others would be {then:.0%} full"
        return (1 if best > num_prefill else -1), gain, split

    def _mover(self, loads: Mapping[str, WorkerLoad], wish: int) -> str:
        """Return the worker with the least work in hand on the side that gives one."""
        giving = {
            each: load for each, load in loads.items() if (load.role == "prefill") == (wish < 0)
        }
        return min(
            giving,
            key=lambda each: (
                giving[each].report.decode_context + giving[each].report.num_waiting_tokens,
                each,
            ),
        )

    def _generating_role(self, loads: Mapping[str, WorkerLoad]) -> WorkerRole:
        return "both" if any(load.role == "both" for load in loads.values()) else "decode"


def _in_words(demand: Demand, num_prefill: int, num_generating: int) -> str:
    prompts = demand.prompts_load(num_prefill, num_generating)
    answers = demand.answers_load(num_generating)
    first_token_ms = demand.first_token_s(num_prefill or num_generating) * 1e3
    step_ms = demand.step_s(num_generating) * 1e3
    takers = (
        f"{num_prefill} prefill workers"
        if num_prefill
        else f"{num_generating} workers of both roles"
    )
    others = f", {num_generating} others" if num_prefill else " and"
    return (
        f"{takers} are {prompts:.0%} full of prompts{others} {answers:.0%} of answers (first token "
        f"in {first_token_ms:.0f} ms, steps of {step_ms:.1f} ms, KV {demand.kv_share:.0%} used)"
    )
