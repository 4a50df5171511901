"""The choice of the next change of a role among the workers of one deployment. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem.config.planner import PlannerConfig
from tandem.launch.planner.demand import Demand, WorkerLoad, demand_of, moved_s
from tandem.runtime.wire.cluster_messages import LoadReport, WorkerRole

MAX_SILENCE_S = 2.0  # of a worker, whose role is not changed then
FULL = 0.9  # load of the fuller side, below which no role moves
GAIN = 0.15  # of the fuller side's load, by which a change must lower it
OVERLOADED_GAIN = 0.05  # of it, where that side cannot keep up
CLEAR_GAIN = 0.3  # of it, from which one reading is enough
RESUMED_S = 30.0  # in which computing the answers of a moved worker anew must pay


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a role, and the reason in a sentence."""

    instance_id: str
    role: WorkerRole
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The state at one decision: the sentence says what it is, and why nothing moves if so."""

    num_prefill: int
    num_generating: int
    sentence: str
    demand: Demand | None = None
    change: Change | None = None


class RolePlanner:
    """Follows the load reports of one deployment and moves roles between prefill and generation.

    Of two sides the fuller one counts: prompts per prefill worker, answers per worker that
    generates them, each as a share of what these can serve. A change must lower that, two readings
    in a row. The caller makes one change at a time, and asks again when it is done.
    """

    def __init__(self, config: PlannerConfig, block_size: int) -> None:
        self.config = config
        self._block_size = block_size
        self._loads: dict[str, WorkerLoad] = {}
        self._last_wish = 0  # prefill workers more or fewer, at the last reading

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
        self._loads = {each: load for each, load in self._loads.items() if each in kept}

    def decide(self, num_ticket_tokens: int, now_s: float) -> Reading:
        """Return the state now, with the next change where one is due.

        `num_ticket_tokens` are those of prompts in the queue.
        """
        loads = {
            each: load for each, load in self._loads.items() if now_s - load.came_s <= MAX_SILENCE_S
        }
        num_prefill = sum(load.role == "prefill" for load in loads.values())
        num_generating = len(loads) - num_prefill
        counts = num_prefill, num_generating
        if not num_prefill and any(load.role == "both" for load in loads.values()):
            return Reading(*counts, "every worker takes prompts as they come: no role to move")
        demand = demand_of(loads.values(), num_ticket_tokens, self._block_size)
        if demand is None or not all(counts):
            why = "no step costs are known yet" if demand is None else "one worker alone"
            return Reading(*counts, f"nothing is planned: {why}", demand)
        state = _in_words(demand, *counts)
        wish, gain, why = self._wish(demand, loads, *counts)
        is_second, self._last_wish = wish == self._last_wish, wish
        if wish == 0:
            return Reading(*counts, f"{state}; {why}", demand)
        if not is_second and gain < CLEAR_GAIN:
            return Reading(*counts, f"{state}; {why} if the next reading agrees", demand)
        instance_id = self._mover(loads, wish)
        role = "prefill" if wish > 0 else self._generating_role(loads)
        change = Change(instance_id, role, f"{state}; {why}")
        return Reading(*counts, f"{state}; {why}: {instance_id[:8]} to {role}", demand, change)

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
    first_token_ms = demand.first_token_s(num_prefill) * 1e3
    step_ms = demand.step_s(num_generating) * 1e3
    return (
        f"{num_prefill} prefill workers are {prompts:.0%} full of prompts, {num_generating} others "
        f"{answers:.0%} of answers (first token in {first_token_ms:.0f} ms, steps of "
        f"{step_ms:.1f} ms, KV {demand.kv_share:.0%} used)"
    )
