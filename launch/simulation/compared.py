"""Layouts of emulated devices beside the same workers unsplit, under a virtual clock.

python -m tandem.launch.simulation.compared --emulate h100/llama-3.1-8b --workers 8 \
    --trace conversation_trace.jsonl --output simulated.json
"""

import dataclasses
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import Summary, meets, summarize
from tandem.bench.load.places import share_remote
from tandem.bench.report.console import say
from tandem.bench.report.document import document, utc_now, write_document
from tandem.bench.report.options import option, parse
from tandem.decode.config import DisaggConfig
from tandem.emulation.profile import load_profile
from tandem.launch.simulation.arrivals import CORNERS, Arrivals, corner, highest_rate, of_trace
from tandem.launch.simulation.cluster import VirtualCluster
from tandem.launch.simulation.emulated import both_targets, disagg_of, setup_of_profile
from tandem.launch.simulation.layout import Layout, layouts_of
from tandem.launch.simulation.load import PlannedRequest
from tandem.runtime.errors import ConfigError, TandemError

MODULE = "tandem.launch.simulation.compared"
SHARE_KEPT = 0.9  # of the requests, within both targets
WARM_UP_SHARE = 0.15  # of a run's seconds, whose requests are not counted
LEAST_REQUESTS = 20  # of a run
LOW, HIGH = 0.3, 1.0  # of the best unsplit contender's rate, at which latencies are compared
WORTH_SEEDS = 0.85  # of the best fixed split's rate by the first seed: others get no more seeds
UNSPLIT, ROUND_ROBIN, DEFAULT = "unsplit", "round robin", "default"
WHOLE = (UNSPLIT, ROUND_ROBIN)
EXIT_FAILED = 1

HOW = {
    "method": "simulated: the router, admission, scheduler and block pool of a cluster under a "
    "virtual clock, steps and links by an emulated device; no messages, no processes",
    "rate": f"most requests/s, of each kind of which {SHARE_KEPT:.0%} are within both targets, by "
    "bisection to 2 % for each seed; the median of the seeds; 0: none",
    "unsplit": "every prompt computed where it is answered, workers chosen by Tandem's router; "
    "round robin: the same, workers chosen in turn",
    "ratio": "of rates within a seed: the median of the seeds, and the least and greatest",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Find the highest rate of each layout that keeps the targets, without running any."""

    emulate: str = option("h100/llama-3.1-8b", "profile of the device, or its file")
    workers: int = option(8, "of every contender", least=2)
    load: tuple[str, ...] = option(
        (), f"loads, by how they begin (default: all): {', '.join(CORNERS)}, names of traces"
    )
    trace: tuple[Path, ...] = option((), "Mooncake traces to replay")
    contender: tuple[str, ...] = option(
        (), "contenders (default: all): unsplit, round robin, 2P 6D and the like, default"
    )
    targets: str = option("ttft:1000 tpot:20", "in ms, of each request; also in force for workers")
    max_num_seqs: int = option(128, "batch rows of a worker", least=1)
    seconds: float = option(40.0, "in which requests arrive", group="course", least=1)
    seeds: int = option(5, "arrivals, or places in a trace", least=1)
    guess: float = option(3.0, "requests/s a worker, where the search begins", least=0.01)
    output: Path | None = option(None, "JSON document", group="result")

    def __post_init__(self) -> None:
        both_targets(self.targets)

    @property
    def slos(self) -> dict[str, float]:
        """The limits in ms."""
        return both_targets(self.targets)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one run; in ms."""

    rate: float
    share_kept: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    share_remote: float


@dataclass(frozen=True, slots=True)
class Found:
    """One contender under one load."""

    rates: list[float]  # by seed
    low: list[Latencies]  # at LOW, by seed
    high: list[Latencies]


class Comparison:
    """The contenders under one load."""

    def __init__(self, options: Options, load: str, disagg: DisaggConfig | None = None) -> None:
        """`disagg` is the config of the workers; None: with the targets of the options."""
        self._options, self._load = options, load
        self._profile = load_profile(options.emulate)
        setup = setup_of_profile(self._profile, disagg or disagg_of(options.slos))
        figures = msgspec.structs.replace(setup.figures, max_num_seqs=options.max_num_seqs)
        self._setup = dataclasses.replace(setup, figures=figures)
        self._layouts = contenders(options)

    def run(self) -> dict[str, Found]:
        """Return what was found of each contender."""
        seeds = range(1, self._options.seeds + 1)
        rates: dict[str, list[float]] = {name: [] for name in self._layouts}
        guess = self._options.guess * self._options.workers
        for seed in seeds:
            for name in self._layouts:
                if seed > 1 and not self._is_worth(name, rates):
                    continue
                start = rates[name][0] if seed > 1 and rates[name][0] else guess
                rates[name].append(highest_rate(partial(self._keeps, name, seed), start))
                guess = rates[name][-1] or guess
                say(f"{self._load}, seed {seed}, {name}: {rates[name][-1]:.1f} requests/s")
        best = best_unsplit(rates)
        return {
            name: Found(found, *(self._at(name, best[: len(found)], each) for each in (LOW, HIGH)))
            for name, found in rates.items()
        }

    def _at(self, name: str, rates: Sequence[float], share: float) -> list[Latencies]:
        """Return the latencies of a contender at a share of `rates`, one for each seed."""
        return [
            self._latencies(name, at + 1, share * each) for at, each in enumerate(rates) if each
        ]

    def _is_worth(self, name: str, rates: dict[str, list[float]]) -> bool:
        splits = [found[0] for each, found in rates.items() if is_split(each)]
        return not is_split(name) or rates[name][0] >= WORTH_SEEDS * max(splits)

    def arrivals(self, rate: float, seed: int) -> Arrivals:
        """Return the requests of a run."""
        options = self._options
        if self._load in CORNERS:
            return corner(self._load, rate, options.seconds, seed)
        path = next(each for each in options.trace if each.stem == self._load)
        figures = self._setup.figures
        longest = min(figures.max_tokens, self._profile.max_position_embeddings)
        return of_trace(path, rate, options.seconds, seed, figures.block_size, longest)

    def _cluster(self, name: str, seed: int) -> VirtualCluster:
        return VirtualCluster(self._layouts[name], dataclasses.replace(self._setup, seed=seed))

    def _keeps(self, name: str, seed: int, rate: float) -> bool:
        """Return True if a run keeps the targets. It is cut off where it cannot any more."""
        if rate * self._options.seconds < LEAST_REQUESTS:
            return False
        arrivals, slos = self.arrivals(rate, seed), self._options.slos
        from_s = WARM_UP_SHARE * self._options.seconds
        counted = Counter(self._kind(each) for each, at_s in arrivals if at_s >= from_s)
        left = {kind: int((1 - SHARE_KEPT) * number) for kind, number in counted.items()}

        def goes_on(record: RequestRecord) -> bool:
            if record.scheduled_s >= from_s and not meets(record, slos):
                left[self._kind(record)] -= 1
            return min(left.values()) >= 0

        self._cluster(name, seed).replay(arrivals, goes_on=goes_on)
        return min(left.values()) >= 0

    def _kind(self, request: PlannedRequest | RequestRecord) -> int:
        """Return the length of a corner's prompts, which tells kinds; a trace is of one kind."""
        if self._load not in CORNERS:
            return 0
        if isinstance(request, RequestRecord):
            return request.num_input_tokens
        return request.num_prompt_tokens

    def records(self, name: str, seed: int, rate: float) -> list[RequestRecord]:
        """Return the requests of a contender's run, without those of the warm-up."""
        outcome = self._cluster(name, seed).replay(self.arrivals(rate, seed))
        from_s = WARM_UP_SHARE * self._options.seconds
        return [each for each in outcome.records if each.scheduled_s >= from_s]

    def _latencies(self, name: str, seed: int, rate: float) -> Latencies:
        return _latencies_of(summarize(self.records(name, seed, rate), self._options.slos), rate)


def _latencies_of(summary: Summary, rate: float) -> Latencies:
    ttft, itl = summary.latencies_ms["ttft"], summary.latencies_ms["itl"]
    share = summary.goodput_share or 0.0
    remote = share_remote(summary.prefill_places)
    return Latencies(rate, share, ttft.p50, ttft.p99, itl.p50, itl.p99, remote)


def contenders(options: Options) -> dict[str, Layout]:
    """Return the layouts by name. Raises ConfigError for a name that is none of them."""
    layouts = {each.name: each for each in layouts_of(options.workers)}
    unsplit, default = layouts.pop(UNSPLIT), layouts.pop("workers")
    in_turn = dataclasses.replace(unsplit, name=ROUND_ROBIN, in_turn=True)
    found = {UNSPLIT: unsplit, ROUND_ROBIN: in_turn, **layouts, DEFAULT: default}
    for name in options.contender:
        if name not in found:
            raise ConfigError(f"--contender {name}: none of {', '.join(found)}")
    return {name: each for name, each in found.items() if name in (options.contender or found)}


def is_split(name: str) -> bool:
    """Return True for a fixed split."""
    return name not in (*WHOLE, DEFAULT)


def best_unsplit(rates: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the better rate of those without a split, by seed; without them the default's."""
    whole = [rates[name] for name in WHOLE if name in rates] or [rates[DEFAULT]]
    return [max(found) for found in zip(*whole, strict=True)]


def best_split(rates: Mapping[str, Sequence[float]]) -> str | None:
    """Return the fixed split with the highest median rate of all seeds."""
    num_seeds = max(map(len, rates.values()))
    names = [name for name in rates if is_split(name) and len(rates[name]) == num_seeds]
    return max(names, key=lambda name: statistics.median(rates[name]), default=None)


TITLES = (
    *("load", "unsplit", "round robin", "best fixed split", "default"),
    *("default / best unsplit", "default / best split", "remote"),
)


def markdown(results: Mapping[str, Mapping[str, Found]]) -> str:
    """Return the rates and their ratios, a row for each load, and the latencies below it."""
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    lines += [f"| {' | '.join(_row(load, found))} |" for load, found in results.items()]
    return "\n".join([*lines, "", *_latency_lines(results)])


def _row(load: str, found: Mapping[str, Found]) -> Iterator[str]:
    rates = {name: each.rates for name, each in found.items()}
    split = best_split(rates)
    yield load
    for name in (*WHOLE, split, DEFAULT):
        if name is None or name not in rates:
            yield "-"
        else:
            text = f"{statistics.median(rates[name]):.1f}"
            yield f"{text} ({name})" if is_split(name) else text
    default = rates.get(DEFAULT)
    yield _ratio(default, best_unsplit(rates))
    yield _ratio(default, None if split is None else rates[split])
    high = found[DEFAULT].high if DEFAULT in found else []
    yield f"{statistics.median(each.share_remote for each in high):.0%}" if high else "-"


def _ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    if ours is None or theirs is None or not all(theirs):
        return "-"
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _latency_lines(results: Mapping[str, Mapping[str, Found]]) -> Iterator[str]:
    titles = ["load", "contender", "at", "within targets", "TTFT p50", "p99", "ITL p50", "p99, ms"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for load, found in results.items():
        split = best_split({name: each.rates for name, each in found.items()})
        for at in ("low", "high"):
            for name in (*WHOLE, split, DEFAULT):
                runs = getattr(found[name], at) if name is not None and name in found else []
                if runs:
                    yield f"| {load} | {name} | {_latency_row(runs)} |"


def _latency_row(runs: Sequence[Latencies]) -> str:
    rate, kept, *latencies = (
        statistics.median(getattr(run, field.name) for run in runs)
        for field in dataclasses.fields(Latencies)[:-1]
    )
    return " | ".join([f"{rate:.1f}/s", f"{kept:.0%}", *(f"{ms:.3g}" for ms in latencies)])


def chosen_loads(options: Options) -> list[str]:
    """Return the loads to simulate. Raises ConfigError for a name that is none."""
    names = [*CORNERS, *(each.stem for each in options.trace)]
    for wanted in options.load:
        if not any(name.startswith(wanted) for name in names):
            raise ConfigError(f"--load {wanted}: none of {', '.join(names)}")
    return [name for name in names if not options.load or name.startswith(options.load)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, print its tables, and return the exit status."""
    options, started_at = parse(Options, MODULE, arguments), utc_now()
    results: dict[str, dict[str, Found]] = {}
    try:
        for load in chosen_loads(options):
            results[load] = Comparison(options, load).run()
            if options.output is not None:
                write_document(options.output, _document(options, results, started_at))
    except (TandemError, OSError) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    print(markdown(results), *(f"{name}: {text}" for name, text in HOW.items()), sep="\n")
    return 0


def _document(
    options: Options, results: Mapping[str, Mapping[str, Found]], started_at: datetime
) -> dict[str, object]:
    return document(
        command=["python", "-m", MODULE, *sys.argv[1:]],
        settings=dataclasses.asdict(options),
        started_at=started_at,
        how=HOW,
        results=msgspec.to_builtins(results),
    )


if __name__ == "__main__":
    sys.exit(main())
