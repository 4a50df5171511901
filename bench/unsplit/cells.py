"""The options of the comparison, and the cells that they describe: one load each."""

import fnmatch
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tandem.bench.load.metrics import parse_slos
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.trace import read_trace
from tandem.bench.report.options import option
from tandem.bench.unsplit.table import BASELINES
from tandem.runtime.errors import ConfigError

DEFAULT = "default"
TraceLoad = Literal["low", "knee", "overload"]
# of the requests/s that the unsplit workers answer to `CAPACITY_CALLERS` callers
SHARES: Mapping[TraceLoad, float] = {"low": 0.5, "knee": 0.85, "overload": 1.25}
CAPACITY_CALLERS = 16
WARM_UP_REQUESTS = 8
REQUEST_TIMEOUT_S = 180.0
QUICK: Mapping[str, Any] = {
    "concurrency": (4,),
    "input_tokens": (300, 1500),
    "output_tokens": (64,),
    "loads": ("knee",),
    "rounds": 2,
    "seconds": 3.0,
    "trace_seconds": 10.0,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Compare topologies with the same workers unsplit: hours, in which nothing else should run."""

    model: Path = option(Path("bundled"), "model, as tandem serve takes it")
    workers: int = option(2, "unsplit workers; every contender must have as many", least=1)
    contender: tuple[str, ...] = option(
        (),
        "topologies to compare, by name or file; default: what tandem serve starts; 2p1d: so many "
        "prefill and decode workers (without any: default, and each split of the workers)",
    )
    setting: tuple[str, ...] = option((), "SECTION.KEY=VALUE of the config of all of them")
    emulate: str | None = option(None, "profile of emulated devices, as tandem serve takes it")
    pace: float = option(1.0, "emulated: time runs so many times slower", least=1)
    concurrency: tuple[int, ...] = option((1, 2, 4, 8, 16), "callers", group="cells", least=1)
    input_tokens: tuple[int, ...] = option((300, 1500, 4000), "of a prompt", least=1)
    output_tokens: tuple[int, ...] = option((16, 64, 256), "of an answer", least=1)
    trace: tuple[Path, ...] = option((), "Mooncake traces to replay")
    loads: tuple[TraceLoad, ...] = option(tuple(SHARES), "of the traces")
    trace_block_tokens: int = option(16, "tokens per hash id of a trace", least=1)
    cells: tuple[str, ...] = option((), "only cells of these names, as c4-1500-* or *-knee")
    quick: bool = option(False, "two cells, and the knee of the traces, for two short rounds")
    rounds: int = option(9, "interleaved rounds", group="course", least=1)
    seconds: float = option(6.0, "in which a closed loop sends", least=0.1)
    trace_seconds: float = option(25.0, "in which a trace's requests arrive", least=1)
    minutes: float = option(300.0, "after which nothing more is started", least=0)
    seed: int | None = option(None, "seed of lengths and prompts (default: a fresh one)")
    tight: str = option("ttft:1000 tpot:5", "targets in ms of the tight goodput", group="result")
    loose: str = option("ttft:1000 tpot:15", "targets in ms of the loose goodput")
    output: Path | None = option(None, "JSON document, written anew after each measurement")
    page: Path | None = option(None, "page whose table is replaced, as docs/benchmarks.md")

    def __post_init__(self) -> None:
        names = [Path(each).stem for each in self.contender]
        for param, chosen in (("contender", names), ("trace", [p.stem for p in self.trace])):
            if len(set(chosen)) < len(chosen) or any(name in BASELINES for name in chosen):
                taken = ", ".join(BASELINES)
                raise ConfigError(f"--{param}: names must differ, and none is of {taken}: {chosen}")
        _ = self.targets

    @property
    def targets(self) -> dict[str, dict[str, float]]:
        """Limits in ms by the name of the goodput. Raises ConfigError for a bad one."""
        return {"tight": parse_slos([self.tight]), "loose": parse_slos([self.loose])}

    def resolved(self) -> "Options":
        """Return the options with a seed, contenders, and those that --quick stands for."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        splits = (f"{count}p{self.workers - count}d" for count in range(1, self.workers))
        contender = self.contender or (DEFAULT, *splits)
        return replace(self, seed=seed, contender=contender, **(QUICK if self.quick else {}))


@dataclass(frozen=True, slots=True)
class Cell:
    """One load."""

    name: str  # c4-1500-64: callers, prompt, answer | conversation_trace-knee
    load: BenchOptions


def trace_names(options: Options) -> dict[str, Path]:
    """Return the traces by the names of their cells."""
    return {f"{trace.stem}-{load}": trace for trace in options.trace for load in options.loads}


def grid_cells(options: Options) -> list[Cell]:
    """Return the cells of closed loops."""
    base = replace(_shared(options), duration=options.seconds)
    grid = itertools.product(options.concurrency, options.input_tokens, options.output_tokens)
    return [
        Cell(
            f"c{callers}-{num_input}-{num_output}",
            replace(base, concurrency=callers, input_tokens=num_input, output_tokens=num_output),
        )
        for callers, num_input, num_output in grid
    ]


def chosen(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that match; all without a pattern. Raises ConfigError for an idle one."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"--cells {pattern}: matches none of {', '.join(names)}")
    return {name for pattern in patterns or ("*",) for name in fnmatch.filter(names, pattern)}


def capacity_load(trace: Path, options: Options) -> BenchOptions:
    """Return the load that tells how many of a trace's requests are answered per second."""
    return replace(
        _shared(options), concurrency=CAPACITY_CALLERS, trace=trace, duration=options.trace_seconds
    )


def trace_cells(trace: Path, capacity: float, options: Options) -> Iterator[Cell]:
    """Yield the loads of a trace: its beginning, at shares of `capacity` requests/s."""
    entries = read_trace(trace)
    for load in options.loads:
        rate = SHARES[load] * capacity
        limit = min(len(entries), max(2, round(rate * options.trace_seconds)))
        span_s = (entries[limit - 1].timestamp - entries[0].timestamp) / 1e3
        if not span_s > 0:
            raise ConfigError(f"trace {trace}: its first {limit} requests arrive all at once")
        scale = rate * span_s / limit
        replayed = replace(_shared(options), trace=trace, limit=limit, time_scale=scale)
        yield Cell(f"{trace.stem}-{load}", replayed)


def _shared(options: Options) -> BenchOptions:
    return BenchOptions(
        seed=options.seed,
        warmup=WARM_UP_REQUESTS,
        timeout=REQUEST_TIMEOUT_S,
        trace_block_tokens=options.trace_block_tokens,
    )
