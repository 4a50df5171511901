"""The figures of an emulated cluster, a real one and a simulated one under the same requests.

python -m tools.emulation.agreement --rate 30 50
python -m tools.emulation.agreement --model FOLDER --emulate fitted.yaml --workers 1 --pace 1
"""

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import summarize
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.places import share_remote
from tandem.bench.load.runs import read_document
from tandem.bench.load.trace_formats import TraceEntry
from tandem.bench.report.console import say
from tandem.bench.report.options import option, parse
from tandem.bench.stack.served_stack import served
from tandem.emulation.profile import load_profile
from tandem.launch.simulation.arrivals import CORNERS, corner
from tandem.launch.simulation.cluster import VirtualCluster
from tandem.launch.simulation.compared import WARM_UP_SHARE
from tandem.launch.simulation.emulated import both_targets, disagg_of, setup_of_profile
from tandem.launch.simulation.layout import Layout, layouts_of
from tandem.launch.simulation.load import PlannedLoad
from tandem.runtime.errors import ConfigError, ServiceError, TandemError

MODULE = "tools.emulation.agreement"
WARM_UP_REQUESTS = 24  # of which workers learn what their steps cost
NUM_SIMULATED = 5  # with other ties each: what chance moves
FAR = 0.10  # a difference beyond which a figure is marked
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Options:
    """Serve the same requests in up to three ways and print the figures of each."""

    emulate: str = option("h100/llama-3.1-8b", "profile of the device, or its file")
    model: str = option("", "folder of a model, to serve by this machine's own engine as well")
    workers: int = option(4, "of the cluster", least=1)
    layout: str = option("workers", "workers (of both roles), unsplit, or a split as in 2P 2D")
    pace: float = option(4.0, "of the emulated cluster", least=1)
    load: str = option("mix", f"{', '.join(CORNERS)}, or a trace's file, replayed as it is")
    rate: tuple[float, ...] = option((30.0, 50.0), "requests/s, each in turn", least=0.01)
    seconds: float = option(30.0, "in which requests arrive", least=1)
    rounds: int = option(1, "of every way, in turn; medians are shown", least=1)
    seed: int = option(1, "of arrivals")
    targets: str = option("ttft:1000 tpot:20", "in ms, of each request; also in force for workers")
    setting: tuple[str, ...] = option((), "of served clusters, as in engine.threads=1")

    @property
    def slos(self) -> dict[str, float]:
        """The limits in ms."""
        return both_targets(self.targets)


class Figures(msgspec.Struct, frozen=True):
    """One run without its first seconds; latencies in ms."""

    num_requests: float
    requests_per_s: float
    output_tokens_per_s: float
    share_remote: float
    share_kept: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float
    late_share: float = 0.0  # of emulated steps
    system_load: float = 0.0  # of the machine, at the end


TITLES = (
    *("way", "requests", "/s", "tokens/s", "remote", "within targets"),
    *("TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "late", "load"),
)
FORMATS = ("", ".3g", ".4g", ".0%", ".0%", ".4g", ".4g", ".3g", ".3g", ".3g", ".1%", ".1f")
COMPARED = slice(1, 10)


def figures_of(records: Sequence[RequestRecord], options: Options) -> Figures:
    """Return the figures of a run. Raises ServiceError if it has a request that failed."""
    from_s = WARM_UP_SHARE * options.seconds
    counted = [each for each in records if each.scheduled_s >= from_s]
    summary = summarize(counted, options.slos)
    if summary.num_succeeded < max(1, len(counted)):
        raise ServiceError(f"{len(counted) - summary.num_succeeded} requests failed")
    ttft, itl, tpot = (summary.latencies_ms[name] for name in ("ttft", "itl", "tpot"))
    return Figures(
        len(counted),
        summary.request_throughput,
        summary.output_token_throughput,
        share_remote(summary.prefill_places),
        summary.goodput_share or 0.0,
        *(ttft.p50, ttft.p99, itl.p50, itl.p99, tpot.p50),
    )


class Agreement:
    """The requests of one rate, in every way."""

    def __init__(self, options: Options, rate: float, folder: Path) -> None:
        """Write the requests as a trace. Raises ConfigError for a bad load or layout."""
        self._options, self._folder = options, folder
        self._layout = chosen_layout(options)
        self._topology = folder / "topology.yaml"
        self._topology.write_text(self._layout.topology({}))
        trace = Path(options.load)
        if options.load in CORNERS:
            trace = folder / "trace.jsonl"
            trace.write_bytes(b"".join(_lines(options, rate)))
        self._bench = BenchOptions(trace=trace, duration=options.seconds, seed=options.seed)

    async def run(self) -> dict[str, list[Figures]]:
        """Return the rounds of each way."""
        options = self._options
        emulated = [f"engine.emulate={options.emulate}", f"runtime.pace={options.pace:g}"]
        ways: dict[str, list[Figures]] = {}
        for index in range(options.rounds):
            if options.model:
                found = await self._served(f"real-{index}", [], 1.0)
                ways.setdefault("real", []).append(found)
            found = await self._served(f"emulated-{index}", emulated, options.pace)
            ways.setdefault("emulated", []).append(found)
        ways["simulated"] = [self.simulated(seed) for seed in range(NUM_SIMULATED)]
        return ways

    def simulated(self, seed: int) -> Figures:
        """Return what `tandem plan --emulate` finds of the layout; `seed` is of the ties."""
        options, device = self._options, load_profile(self._options.emulate)
        setup = setup_of_profile(device, disagg_of(options.slos), seed)
        figures = setup.figures
        load = PlannedLoad(self._bench, options.seed, figures.block_size, figures.max_tokens)
        outcome = VirtualCluster(self._layout, setup).run(load, lambda num_finished: None)
        return figures_of(outcome.records, options)

    async def _served(self, name: str, settings: Sequence[str], pace: float) -> Figures:
        options, document = self._options, self._folder / f"{name}.json"
        targets = [f"disagg.{key}_target_ms={options.slos[of]:g}" for key, of in TARGETS.items()]
        flags = [f"--{each}" for each in (*settings, *targets, *options.setting)]
        model = Path(options.model or "bundled")
        run_dir = self._folder / name
        async with served(model, str(self._topology), flags, run_dir) as stack:
            cpu_s = stack.cpu_s()
            await self._load(stack.url, document, pace)
            late_share = await stack.late_share()
            used = {role: after - cpu_s[role] for role, after in stack.cpu_s().items()}
        records = list(read_document(document).requests)
        say(f"{name}: CPU seconds " + ", ".join(f"{role} {s:.1f}" for role, s in used.items()))
        figures = figures_of(records, options)
        system_load = os.getloadavg()[0]
        return msgspec.structs.replace(figures, late_share=late_share, system_load=system_load)

    async def _load(self, url: str, document: Path, pace: float) -> None:
        """Run `tandem bench`, whose clock has the cluster's pace."""
        bench = self._bench
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem.launch", "bench", "--url", url),
            *("--trace", str(bench.trace), "--duration", str(bench.duration)),
            *("--seed", str(bench.seed), "--pace", str(pace)),
            # a chunk for each token, also for one that is only a part of a character
            *("--extra-body", '{"return_token_ids": true}'),
            *("--warmup", str(WARM_UP_REQUESTS), "--records", "--output", str(document)),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            status = await child.wait()
        finally:
            if child.returncode is None:
                child.kill()
        if status:
            raise ServiceError(f"tandem bench ended with {status}")


TARGETS = {"ttft": "ttft", "itl": "tpot"}  # of workers |-> as tandem bench names them


def chosen_layout(options: Options) -> Layout:
    """Return the layout by its name. Raises ConfigError for one that is none."""
    layouts = {each.name: each for each in layouts_of(options.workers)}
    if options.layout not in layouts:
        raise ConfigError(f"--layout {options.layout}: none of {', '.join(layouts)}")
    return layouts[options.layout]


def _lines(options: Options, rate: float) -> Iterator[bytes]:
    for request, at_s in corner(options.load, rate, options.seconds, options.seed):
        entry = TraceEntry(1e3 * at_s, request.num_prompt_tokens, request.num_answer_tokens)
        yield msgspec.json.encode(entry) + b"\n"


def markdown(ways: dict[str, list[Figures]]) -> str:
    """Return the medians of each way, their range, and their differences from the first way's."""
    medians = {name: _medians(rounds) for name, rounds in ways.items()}
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for name, values in medians.items():
        cells = [format(value, form) for value, form in zip(values, FORMATS, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        if len(ways[name]) > 1:
            lines.append(f"| its range | {' | '.join(_ranges(ways[name]))} |")
    first, *others = medians
    for name in others:
        pairs = zip(medians[name][COMPARED], medians[first][COMPARED], strict=True)
        cells = ["", *(_difference(ours, theirs) for ours, theirs in pairs), "", ""]
        lines.append(f"| {name} against {first} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _medians(rounds: Sequence[Figures]) -> list[float]:
    return [statistics.median(found) for found in _columns(rounds)]


def _ranges(rounds: Sequence[Figures]) -> Iterator[str]:
    for found, form in zip(_columns(rounds), FORMATS, strict=True):
        yield f"{min(found):{form}} to {max(found):{form}}"


def _columns(rounds: Sequence[Figures]) -> list[tuple[float, ...]]:
    return list(zip(*map(msgspec.structs.astuple, rounds), strict=True))


def _difference(ours: float, theirs: float) -> str:
    if not theirs:
        return "-"
    share = ours / theirs - 1
    return f"**{share:+.0%}**" if abs(share) > FAR else f"{share:+.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every way at every rate, print the tables, and return the exit status."""
    options = parse(Options, MODULE, arguments)
    try:
        for rate in options.rate:
            with tempfile.TemporaryDirectory(prefix="tandem-agreement-") as folder:
                ways = asyncio.run(Agreement(options, rate, Path(folder)).run())
            print(f"\n{options.load}, {rate:g} requests/s\n\n{markdown(ways)}", flush=True)
    except (TandemError, OSError) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
