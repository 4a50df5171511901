"""Figures of transfers between two processes: bandwidth, round trips, resting."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.bench.handoff.peer import whole_checksums
from tandem.bench.handoff.plan import Plan
from tandem.bench.handoff.wire import (
    AGENTS,
    BARE,
    CHECKED,
    LOOPS,
    PAUSING,
    Wire,
    adjacent,
    check_arrival,
    resting_shares,
    time_loop_round_trips,
    time_reads,
    time_round_trips,
    time_writes,
    timed,
)
from tandem.bench.report.figures import (
    Bound,
    Figure,
    Target,
    at_least,
    at_most,
    flat,
    in_unit,
    medians,
    percentile,
    ratio,
)

Rounds = list[list[float]]  # samples of each round
MIB = 1 << 20
READ_TARGET = at_least(20.0)  # on a GPU; over TCP it is 0.5 GB/s
SLOW_WRITE_S = 0.5  # a write that is this slow is measured once a turn


@dataclass(slots=True)
class WireResults:
    """The samples of the rounds over the wire, in seconds and shares of a core."""

    writes: dict[tuple[str, str], Rounds] = field(default_factory=lambda: defaultdict(list))
    reads: Rounds = field(default_factory=list)
    trips: dict[str, Rounds] = field(default_factory=lambda: defaultdict(list))
    small_writes: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    checksum_bytes_per_s: list[float] = field(default_factory=list)
    resting: dict[str, float] = field(default_factory=dict)

    def bare(self, case: str) -> Rounds:
        """Return the bare library's writes, with the polling that was faster over all rounds."""
        both = [self.writes[case, how] for how in (BARE, PAUSING)]
        return min(both, key=lambda rounds: statistics.median(flat(rounds)))

    def wire_ms(self, num_bytes: float) -> float:
        """Return the least time of so many bytes by the bare library, from the size measured below.

        The fastest tenth of the writes counts, for it is undisturbed.
        """
        known = {size: percentile(samples, 0.1) for size, samples in self.small_writes.items()}
        below = max((size for size in known if size <= num_bytes), default=min(known))
        return min(1.0, num_bytes / below) * known[below] * 1e3


async def measure_wire(between: Wire, plan: Plan) -> WireResults:
    """Measure bandwidth, round trips and resting between two processes."""
    results = WireResults()
    await time_writes(between, adjacent(plan.shape.num_blocks), AGENTS, 2)  # faults pages in
    for _ in range(plan.rounds):
        await _wire_round(between, plan, results)
    results.resting = await resting_shares(between, plan.rest_s)
    return results


async def _wire_round(between: Wire, plan: Plan, results: WireResults) -> None:
    for case, (_, pairs) in plan.cases().items():
        found: dict[str, list[float]] = {BARE: [], PAUSING: [], AGENTS: [], CHECKED: []}
        for _ in range(plan.num_batches):
            for how, samples in found.items():
                samples += await time_writes(between, pairs, how, 1)
                if samples[-1] < SLOW_WRITE_S:
                    samples += await time_writes(between, pairs, how, plan.num_writes - 1)
        for how, samples in found.items():
            results.writes[case, how].append(samples)
        await check_arrival(between, pairs)
    results.reads.append(
        await time_reads(between, adjacent(plan.shape.num_blocks), plan.num_writes)
    )
    for num_blocks in (1, 2, 4, 8, 16, 32):
        samples = await time_writes(between, adjacent(num_blocks), BARE, 4 * plan.num_writes)
        results.small_writes[num_blocks * plan.shape.block_bytes] += samples
    for how in (BARE, AGENTS):
        trips = await time_round_trips(between, plan.num_pings, bare=how == BARE)
        results.trips[how].append(trips)
    results.trips[LOOPS].append(await time_loop_round_trips(between, plan.num_pings))
    blocks = list(range(plan.shape.num_blocks))
    took_s = await timed(whole_checksums(between.end, blocks))
    results.checksum_bytes_per_s.append(len(blocks) * plan.shape.block_bytes / took_s)


def wire_figures(
    plan: Plan, results: WireResults, payload_target: Target | None = None
) -> Iterator[Figure]:
    """Yield (b) and (c); `payload_target` is of the agents' rate, beside that of a copy."""
    for case, (words, pairs) in plan.cases().items():
        num_bytes = len(pairs) * plan.shape.block_bytes
        label = f"{words} ({num_bytes / MIB:.3g} MiB)"
        bare = results.bare(case)
        rates = in_unit(medians(bare), "GB/s", num_bytes)
        bound = Bound("copy", 2.0)  # a write reads and writes each byte, as a copy does
        name, label = f"bandwidth_{case}_bare", f"(b) bare library, {label}"
        yield Figure(name, label, "GB/s", rates, bound=bound)
        for key, how in (("agents", AGENTS), ("checked", CHECKED)):
            ours, is_judged = results.writes[case, how], key == "agents" and case != "part"
            rates = in_unit(medians(ours), "GB/s", num_bytes)
            target = payload_target if is_judged else None
            name = f"bandwidth_{case}_{key}_rate"
            yield Figure(name, f"(b)   {how}", "GB/s", rates, target, bound=bound)
            target = at_least(0.95) if is_judged else None
            label = f"(b)   {how}, ratio to it"
            yield ratio(f"bandwidth_{case}_{key}", label, bare, ours, target)
    num_bytes = plan.shape.num_blocks * plan.shape.block_bytes
    rates = in_unit(medians(results.reads), "GB/s", num_bytes)
    target = READ_TARGET if payload_target else None
    label = f"(b) READ of {plan.shape.num_blocks} blocks, agents"
    yield Figure("read_rate", label, "GB/s", rates, target, bound=Bound("copy", 2.0))
    for how, words, target in (
        (LOOPS, "notification there and back between the agents' poll loops", at_most(50.0)),
        (AGENTS, "  between their event loops", None),
        (BARE, "  bare library", None),
    ):
        rounds, name = results.trips[how], how.replace(" ", "_")
        p50 = tuple(each * 1e6 for each in medians(rounds))
        p99 = tuple(percentile(samples, 0.99) * 1e6 for samples in rounds)
        yield Figure(f"round_trip_{name}_p50_us", f"(c) {words}, p50", "us", p50, target)
        yield Figure(f"round_trip_{name}_p99_us", f"(c) {words}, p99", "us", p99)
    for state, share in results.resting.items():
        label = f"(c) agent alone, {state}: share of a core"
        yield Figure(f"agent_{state}_percent", label, "%", (100 * share,), at_most(5.0))
