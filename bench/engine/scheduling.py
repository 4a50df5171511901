"""What a decode step costs the host besides the runner, on a stand-in for it."""

import itertools
from collections.abc import Iterator

from tandem.bench.engine.host import HostTime, measure
from tandem.bench.engine.setting import num_rounds
from tandem.bench.kernels.figures import Goal, Measurement
from tandem.bench.kernels.timing import Setting

NUM_SEQS, NUM_STEPS = 256, 500
GOAL = Goal(500.0)


def run(setting: Setting) -> Iterator[Measurement]:
    """With and without overlap, in turns; the same on every device, for it is the host's."""
    num_seqs, num_steps = setting.size(NUM_SEQS, 8), setting.size(NUM_STEPS, 10)
    found: dict[bool, list[HostTime]] = {True: [], False: []}
    for _, overlap in itertools.product(range(num_rounds(setting)), found):
        found[overlap].append(measure(num_seqs, num_steps, overlap=overlap))
    for overlap, rounds in found.items():
        word = "on" if overlap else "off"
        yield Measurement(
            name=f"scheduling_overlap_{word}",
            label=f"scheduler's host time of a step, {num_seqs} running, overlap {word}",
            unit="us",
            values=tuple(each.median_us for each in rounds),
            goal=GOAL,
            note="CPU time; p99 " + ", ".join(f"{each.p99_us:.0f}" for each in rounds),
        )
