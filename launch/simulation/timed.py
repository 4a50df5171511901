"""Layouts of emulated devices at given rates, with no targets in force, under a virtual clock.

python -m tandem.launch.simulation.timed --emulate h100/llama-3.1-8b --workers 4 \
    --load mix --rate 20 60
"""

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.bench.load.metrics import summarize
from tandem.bench.load.places import share_remote
from tandem.bench.report.console import say
from tandem.bench.report.options import option, parse
from tandem.decode.config import DisaggConfig
from tandem.launch.simulation.arrivals import CORNERS
from tandem.launch.simulation.compared import (
    EXIT_FAILED,
    Comparison,
    chosen_loads,
    contenders,
)
from tandem.launch.simulation.compared import Options as ComparedOptions
from tandem.runtime.errors import ConfigError, TandemError

MODULE = "tandem.launch.simulation.timed"
TITLES = (
    *("load", "requests/s", "contender", "whole answer, mean, s", "TTFT mean", "p99, ms"),
    *("ITL p50", "p99, ms", "remote"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """Time the answers of each layout at some rates, without running any."""

    emulate: str = option("h100/llama-3.1-8b", "profile of the device, or its file")
    workers: int = option(4, "of every contender", least=2)
    load: tuple[str, ...] = option(
        (), f"loads, by how they begin (default: all): {', '.join(CORNERS)}, names of traces"
    )
    trace: tuple[Path, ...] = option((), "Mooncake traces to replay")
    rate: tuple[float, ...] = option((), "requests/s")
    contender: tuple[str, ...] = option((), "as of the comparison by targets (default: all)")
    max_num_seqs: int = option(128, "batch rows of a worker", least=1)
    seconds: float = option(60.0, "in which requests arrive", group="course", least=1)
    seeds: int = option(3, "arrivals, or places in a trace", least=1)

    def __post_init__(self) -> None:
        if not self.rate:
            raise ConfigError("--rate: one or more rates, in requests/s")


def timed(comparison: Comparison, name: str, seed: int, rate: float) -> tuple[float, ...]:
    """Return what the table says of a contender's run, in the order of its last columns."""
    records = comparison.records(name, seed, rate)
    summary = summarize(records, {})
    ttft, itl = summary.latencies_ms["ttft"], summary.latencies_ms["itl"]
    answer_s = statistics.mean(each.e2el_s for each in records)
    remote = share_remote(summary.prefill_places)
    return answer_s, ttft.mean, ttft.p99, itl.p50, itl.p99, remote


def rows(options: Options) -> Iterator[str]:
    """Yield a line of the table for each load, rate and contender: the medians of the seeds.

    Raise ConfigError for a load or a contender that is none.
    """
    shared = asdict(options)
    del shared["rate"]
    chosen = ComparedOptions(**shared)
    for load in chosen_loads(chosen):
        comparison = Comparison(chosen, load, DisaggConfig())
        for rate, name in itertools.product(options.rate, contenders(chosen)):
            runs = [timed(comparison, name, seed + 1, rate) for seed in range(options.seeds)]
            answer_s, *times_ms, remote = map(statistics.median, zip(*runs, strict=True))
            cells = [f"{answer_s:.2f}", *(f"{ms:.3g}" for ms in times_ms), f"{remote:.0%}"]
            yield f"| {' | '.join([load, f'{rate:g}', name, *cells])} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table row by row, and return the exit status."""
    options = parse(Options, MODULE, arguments)
    print(f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", sep="\n")
    try:
        for row in rows(options):
            print(row, flush=True)
    except (TandemError, OSError) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
