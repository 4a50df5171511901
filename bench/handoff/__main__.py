"""The cost of a handoff on this machine, figure by figure, each against its target.

python -m tandem.bench.handoff --output handoff.json
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.bench.handoff.plan import QUICK, Plan
from tandem.bench.handoff.served_figures import measure_served, served_figures
from tandem.bench.handoff.wire import wire
from tandem.bench.handoff.wire_figures import measure_wire, wire_figures
from tandem.bench.report.console import say
from tandem.bench.report.figures import Figure
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program

MODULE = "tandem.bench.handoff"
HOW = {
    "(a)": "from the prompt's last KV (the timeline's `computed`) until all of it is proven at the "
    "decode worker (`verified`), less the bare library's time for the bytes that can't have left "
    "before; the second goes on to `first_step` and takes one later decode step off. `computed` is "
    "the prefill worker's clock set by the claim's answer, so one message's time counts too. Two "
    "workers on one GPU take turns on it, a few milliseconds each, which lengthens the handover",
    "(b)": "two processes, the same prepared descriptors and blocks; a write is over when its "
    "sender knows it has arrived; the bare library polls without a pause or with pauses of 20 us, "
    "whichever is faster",
    "(c)": "two processes whose agents poll as while a handoff is under way; CPU by the processes' "
    "own accounts",
    "(d)": "the exposed part by the timeline; the work by the rate of one core's checksums",
    "(e)": "`computed` to `verified`, of two topologies in turns: stream_layers on and off; both "
    "send earlier chunks while later ones are computed",
    "model": "random weights, 4 layers with 1 KV head of 64 in float32: 2 KiB of KV per token",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Measure handoffs on this machine: minutes, in which it should do nothing else."""

    rounds: int | None = option(None, "rounds, of which medians are shown", least=1)
    quick: bool = option(False, "a few samples of everything: no figures")
    served: bool = option(True, "handoffs of served processes, too")
    output: Path | None = option(None, "write everything as JSON")

    def plan(self) -> Plan:
        plan = QUICK if self.quick else Plan()
        return plan if self.rounds is None else dataclasses.replace(plan, rounds=self.rounds)


async def measure(options: Options, run_dir: Path) -> list[Figure]:
    """Return every figure of the sections asked for."""
    plan, figures = options.plan(), list[Figure]()
    say("two processes: bandwidth, round trips, resting")
    async with wire(plan.shape) as between:
        wires = await measure_wire(between, plan)
    figures += wire_figures(plan, wires)
    if options.served:
        say("served processes: handover, verification, streaming")
        figures += served_figures(await measure_served(plan, run_dir), wires)
    return sorted(figures, key=lambda figure: figure.label[:3])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, HOW, partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
