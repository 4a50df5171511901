"""Works that take turns on a CPU: their times, and how each compares with the first."""

import time
from collections.abc import Callable, Iterator, Mapping

from tandem.bench.report.figures import Figure, Target, in_unit, required

Work = Callable[[], object]


def compared(
    label: str,
    works: Mapping[str, Work],
    num_rounds: int,
    target: Target,
    *,
    clock: Callable[[], float] = time.process_time,
) -> Iterator[Figure]:
    """Yield the times of the works, and the ratio of each to the first; one off target fails.

    The ratio is of times, or how many times as fast it is where it has to be at least the target.
    By default times are CPU time, which other programs prolong less.
    """
    seconds = _in_turns(works, num_rounds, clock)
    key, (first, *others) = label.replace(" ", "_"), works
    for name, samples in seconds.items():
        yield Figure(f"{key}_{name}_ms", f"{label}, {name}", "ms", in_unit(samples, "ms"))
    for name in others:
        pairs = zip(seconds[name], seconds[first], strict=True)
        ratios = tuple(a / b if target.kind == "at most" else b / a for a, b in pairs)
        words = "times the time of" if target.kind == "at most" else "times as fast as"
        yield required(
            Figure(f"{key}_{name}_ratio", f"  {name}, {words} {first}", "x", ratios, target)
        )


def _in_turns(
    works: Mapping[str, Work], num_rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each work in each round but the first two, which warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for index in range(2 + num_rounds):
        for name, work in works.items():
            began = clock()
            work()
            if index >= 2:
                seconds[name].append(clock() - began)
    return seconds
