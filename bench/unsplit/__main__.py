"""Topologies beside the same workers unsplit, chosen by the router and in turn, under one load.

python -m tandem.bench.unsplit --trace conversation_trace.jsonl --output unsplit.json
"""

import contextlib
import dataclasses
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from tandem.bench.client.http import ExchangeError
from tandem.bench.client.openai import OpenAIClient
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.places import commonest, reasons_of
from tandem.bench.load.session import Run, Session
from tandem.bench.load.trace import read_trace
from tandem.bench.report.console import say
from tandem.bench.report.document import document, this_commit, utc_now, with_part, write_document
from tandem.bench.report.options import parse
from tandem.bench.stack.served_stack import ServedStack, served
from tandem.bench.unsplit.cells import (
    CAPACITY_CALLERS,
    DEFAULT,
    SHARES,
    Cell,
    Options,
    capacity_load,
    chosen,
    grid_cells,
    trace_cells,
    trace_names,
)
from tandem.bench.unsplit.table import (
    BASELINES,
    ROUND_ROBIN,
    UNSPLIT,
    Reasons,
    Results,
    figures_of,
    markdown,
    values_of,
)
from tandem.config.topology import Topology, load_topology
from tandem.emulation.profile import MAX_LATE_SHARE
from tandem.runtime.clock import set_pace
from tandem.runtime.errors import ConfigError, ServiceError, TandemError

MODULE = "tandem.bench.unsplit"
BEGIN, END = "<!-- unsplit: bench/unsplit writes this table -->", "<!-- end of unsplit -->"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

HOW = {
    UNSPLIT: "decode workers that prefill every prompt themselves (policy always_local)",
    ROUND_ROBIN: "the same workers, chosen in turn (router.policy round_robin)",
    "ratio": "how many times as good as the unsplit workers with the better median of the metric "
    "in the cell, for rates and for times alike: above 1 is better. The median of the ratios "
    "within each round; their least and greatest",
    "cell": "c4-1500-64 is a closed loop of 4 callers, prompts of 1500 tokens, answers of 64; "
    "a trace's beginning is scaled in time to a share of its capacity",
    "capacity": f"requests/s of the trace that the unsplit workers answer to {CAPACITY_CALLERS} "
    f"callers; {', '.join(f'{name} is {share:g} of it' for name, share in SHARES.items())}",
    "turns": "the clusters run beside each other, started anew for each cell, and answer one at a "
    "time; every other round goes in reverse order",
    "goodput": "requests/s that keep all targets",
    "late_share": "of emulated workers: the time by which the host was late, of the time of all "
    f"steps since their start; rounds above {MAX_LATE_SHARE:g} are not judged",
    "remote": "the share of the prompts that other workers computed, median of the rounds",
    "num_failed": "requests with an error or with a shorter answer than asked for",
}

UNSPLIT_TOPOLOGY = """\
roles:
  frontend: {{count: 1, config: {{router.policy: {policy}}}}}
  decode: {{count: {workers}, gpu: auto, config: {{disagg.policy: always_local}}}}
"""


SPLIT_TOPOLOGY = """\
roles:
  frontend: {{count: 1}}
  prefill: {{count: {0}, gpu: auto}}
  decode: {{count: {1}, gpu: auto}}
"""


class Contender(NamedTuple):
    """A running topology, and a client of it."""

    client: OpenAIClient
    stack: ServedStack


class Comparison:
    """The contenders, and the results so far."""

    def __init__(self, options: Options, run_dir: Path) -> None:
        """Raise ConfigError for a contender that is no topology, or one of other hardware."""
        self.results: Results = {}
        self.reasons: Reasons = {}
        self._options = options
        self._run_dir = run_dir
        self._deadline_s = time.perf_counter() + options.minutes * 60
        self._started_at, self._commit = utc_now(), this_commit()
        self._topologies: dict[str, str | None] = {}
        for name, policy in zip(BASELINES, ("cost", "round_robin"), strict=True):
            unsplit = run_dir / f"{name}.yaml"
            unsplit.write_text(UNSPLIT_TOPOLOGY.format(workers=options.workers, policy=policy))
            self._topologies[name] = str(unsplit)
        for name in options.contender:
            file = self._split_file(name) or name
            self._topologies[Path(name).stem] = None if name == DEFAULT else file
            if name != DEFAULT:
                self._require_same_hardware(name, load_topology(file))

    async def run(self) -> None:
        """Measure every cell until the time is over.

        Raises ConfigError, ServiceError and ExchangeError.
        """
        options = self._options
        grid, of_traces = grid_cells(options), trace_names(options)
        names = chosen([*(cell.name for cell in grid), *of_traces], options.cells)
        cells = [cell for cell in grid if cell.name in names]
        traces = dict.fromkeys(of_traces[name] for name in of_traces if name in names)
        for trace in traces:
            read_trace(trace)  # a bad one is refused before anything is measured
        for trace in traces:
            load = capacity_load(trace, options)
            async with self._served(UNSPLIT, load) as unsplit:
                run = await self._measure(unsplit.client, load, f"capacity of {trace.stem}", 0)
            capacity = run.summary.request_throughput
            say(f"capacity of {trace.stem}: {capacity:.2f} requests/s")
            cells += (cell for cell in trace_cells(trace, capacity, options) if cell.name in names)
        for cell in cells:
            await self._measure_cell(cell)

    def _split_file(self, name: str) -> str | None:
        """Write the topology of a fixed split, as 2p1d; None for another name."""
        if (split := re.fullmatch(r"([1-9]\d*)p([1-9]\d*)d", name)) is None:
            return None
        file = self._run_dir / f"{name}.yaml"
        file.write_text(SPLIT_TOPOLOGY.format(*split.groups()))
        return str(file)

    async def _measure_cell(self, cell: Cell) -> None:
        async with contextlib.AsyncExitStack() as stack:
            contenders = {
                name: await stack.enter_async_context(self._served(name, cell.load))
                for name in self._topologies
            }
            for index in range(self._options.rounds):
                if time.perf_counter() > self._deadline_s:
                    say(f"the time is over: {cell.name} gets {index} rounds")
                    return
                for name in contenders if index % 2 == 0 else reversed(contenders):
                    await self._take_turn(contenders[name], name, cell, index)

    async def _take_turn(self, contender: Contender, name: str, cell: Cell, index: int) -> None:
        run = await self._measure(contender.client, cell.load, f"{cell.name}, {name}", index)
        values = values_of(run, self._options.targets) | {"time_scale": cell.load.time_scale}
        if self._options.emulate is not None:
            values["late_share"] = await contender.stack.late_share()
        self.results.setdefault(cell.name, {}).setdefault(name, []).append(values)
        found = reasons_of(record for record in run.result.records if record.succeeded)
        self.reasons.setdefault(name, Counter()).update(found)
        say(
            f"{cell.name}, round {index + 1} of {self._options.rounds}, {name}: "
            f"{values['request_throughput']:.2f} requests/s, {values['e2el p50']:.0f} ms, "
            f"{values['remote_share']:.0%} remote"
        )
        if self._options.output is not None:
            write_document(self._options.output, self._document())

    @contextlib.asynccontextmanager
    async def _served(self, name: str, warm_up: BenchOptions) -> AsyncIterator[Contender]:
        """Run a contender, which has answered the warm-up requests of a load."""
        run_dir = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._run_dir))
        session = Session(warm_up)
        topology = self._topologies[name]
        flags = self._flags(topology)
        async with served(self._options.model, topology, flags, run_dir) as stack:
            client = session.client(stack.url)
            try:
                await session.warm_up(client, await session.body(client))
                yield Contender(client, stack)
            finally:
                client.close()

    def _flags(self, topology: str | None) -> list[str]:
        options = self._options
        flags = [f"--{each}" for each in options.setting]
        if topology is None:
            flags.append(f"--workers={options.workers}")
        if options.emulate is not None:
            flags += [f"--engine.emulate={options.emulate}", f"--runtime.pace={options.pace}"]
        return flags

    def _require_same_hardware(self, name: str, topology: Topology) -> None:
        count = sum(spec.count for spec in topology.roles if spec.role != "frontend")
        if count != self._options.workers:
            raise ConfigError(
                f"{name} has {count} workers and {UNSPLIT} has {self._options.workers} "
                "(--workers): this compares the same hardware"
            )

    async def _measure(
        self, client: OpenAIClient, load: BenchOptions, label: str, index: int
    ) -> Run:
        session = Session(load)
        body = await session.body(client)
        run = await session.measure(client, body, label=label, round_index=index)
        if not run.summary.num_succeeded:
            raise ServiceError(f"{label}: every request failed: {run.summary.errors}")
        return run

    def _document(self) -> dict[str, object]:
        return document(
            command=["python", "-m", MODULE, *sys.argv[1:]],
            settings=dataclasses.asdict(self._options),
            started_at=self._started_at,
            how=HOW,
            figures=figures_of(self.results),
            commit=self._commit,
            cells=self.results,
            reasons={name: commonest(found) for name, found in self.reasons.items()},
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, print its table, and return the exit status."""
    options = parse(Options, MODULE, arguments).resolved()
    set_pace(options.pace)
    status = 0
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        try:
            comparison = Comparison(options, Path(folder))
            page = None if options.page is None else options.page.read_text(encoding="utf-8")
            if page is not None:
                with_part(page, BEGIN, END, "")  # an error comes before the hours of measuring
        except (ConfigError, OSError) as error:
            say(f"error: {error}")
            return EXIT_FAILED
        try:
            uvloop.run(comparison.run())
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
        except (TandemError, ExchangeError) as error:
            say(f"error: {error}")
            status = EXIT_FAILED
    table = markdown(comparison.results, comparison.reasons)
    print(table, *(f"{name}: {text}" for name, text in HOW.items()), sep="\n")
    if options.page is not None and page is not None:
        options.page.write_text(with_part(page, BEGIN, END, table), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
