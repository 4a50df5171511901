"""`tandem plan`: every layout of some workers under one load, and the best one as a file."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from tandem.bench.load.metrics import summarize
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.places import reason_lines
from tandem.bench.load.runs import RunFigures, Side
from tandem.bench.picture.drawing import require_matplotlib, write_plot
from tandem.config.live import plain
from tandem.config.model import EffectiveConfig
from tandem.emulation.profile import Profile, load_profile
from tandem.launch.simulation.cluster import Setup, VirtualCluster
from tandem.launch.simulation.emulated import figures_of_profile, handoff_time_of
from tandem.launch.simulation.figures import LayoutFigures, best_of, figures_of, table_of
from tandem.launch.simulation.layout import Layout, layouts_of
from tandem.launch.simulation.load import PlannedLoad
from tandem.launch.simulation.options import HandoffOptions, LoadOptions
from tandem.launch.simulation.source import figures_in, figures_of_cluster, with_engine_settings
from tandem.launch.simulation.worker import HandoffTime, WorkerFigures
from tandem.runtime.errors import ConfigError
from tandem.runtime.process.progress import ProgressBar
from tandem.runtime.process.reporter import wide_console

SIMULATED_SECTIONS = ("disagg", "engine", "prefill", "router")
PROGRESS_EVERY = 64  # requests


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan but for its load and its config."""

    num_workers: int
    costs: Path | None
    model: str
    emulate: str | None  # profile of a device
    output: Path | None
    plot: Path | None
    as_json: bool


def run_plan(
    effective: EffectiveConfig, load: LoadOptions, handoff: HandoffOptions, options: PlanOptions
) -> None:
    """Simulate every layout and print them. Raises ConfigError and ServiceError."""
    if options.plot is not None:
        require_matplotlib("--plot")
    bench = BenchOptions(**asdict(load))
    device = None if options.emulate is None else load_profile(options.emulate)
    figures = _worker_figures(effective, options, device)
    setup = _setup(effective, figures, handoff, load.seed, device)
    planned = PlannedLoad(bench, load.seed, figures.block_size, figures.max_tokens)
    found: dict[str, tuple[Layout, LayoutFigures]] = {}
    drawn: list[Side] = []
    candidates = list(layouts_of(options.num_workers))
    with ProgressBar("plan", total=len(candidates)) as bar:
        for index, layout in enumerate(candidates):
            on_progress = _progress_of(bar, index, layout.name, planned.total)
            outcome = VirtualCluster(layout, setup).run(planned, on_progress)
            if not outcome.records:
                raise ConfigError("the load has no requests: --duration, --num-requests, --limit")
            summary = summarize(outcome.records, _targets(setup))
            found[layout.name] = layout, figures_of(outcome, summary)
            if options.plot is not None:
                drawn.append(Side(layout.name, [RunFigures(summary, outcome.records)]))
    layouts = [figures for _, figures in found.values()]
    best, _ = found[best_of(layouts).name]
    if options.output is not None:
        options.output.write_text(best.topology(_settings(effective)))
    if options.plot is not None:
        write_plot(options.plot, drawn)
    if options.as_json:
        print(json.dumps(_document(setup, layouts, best), indent=2))
    else:
        _print(layouts, best, options, figures.model)


def _worker_figures(
    effective: EffectiveConfig, options: PlanOptions, device: Profile | None
) -> WorkerFigures:
    if device is not None:
        figures = figures_of_profile(device)
    elif options.costs is not None:
        figures = figures_in(options.costs)
    else:
        figures = asyncio.run(figures_of_cluster(effective, options.model))
    return with_engine_settings(figures, effective)


def _setup(
    effective: EffectiveConfig,
    figures: WorkerFigures,
    handoff: HandoffOptions,
    seed: int,
    device: Profile | None,
) -> Setup:
    config = effective.config
    time = HandoffTime(handoff.handoff_ms / 1e3, handoff.handoff_us_per_token / 1e6)
    if device is not None:
        time = handoff_time_of(device)
    return Setup(figures, config.disagg, config.prefill, config.router, time, seed, device)


def _targets(setup: Setup) -> dict[str, float]:
    """Return the targets as limits of `tandem bench --goodput`: ITL as the mean of an answer."""
    limits = {"ttft": setup.disagg.ttft_target_ms, "tpot": setup.disagg.itl_target_ms}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _settings(effective: EffectiveConfig) -> dict[str, Any]:
    """Return the settings that the layouts were simulated with, for their topology."""
    return {
        key: plain(effective, key)
        for key in effective.settings
        if key.partition(".")[0] in SIMULATED_SECTIONS
    }


def _document(setup: Setup, layouts: list[LayoutFigures], best: Layout) -> dict[str, Any]:
    return {
        "worker": msgspec.to_builtins(setup.figures),
        "handoff": msgspec.to_builtins(setup.handoff),
        "targets_ms": _targets(setup),
        "seed": setup.seed,
        "layouts": msgspec.to_builtins(layouts),
        "best": best.name,
    }


def _print(layouts: list[LayoutFigures], best: Layout, options: PlanOptions, model: str) -> None:
    console = wide_console()
    workers = f"{options.num_workers} workers" + (f" with the costs of {model}" if model else "")
    console.print(table_of(layouts, f"{workers}, simulated; latencies in ms"))
    for layout in layouts:
        console.print(f"\nplaces of prompts with {layout.name}, the commonest reasons:")
        for line in reason_lines(layout.reasons):
            console.print(Text(line), soft_wrap=True)
    if options.output is None:
        console.print(f"\n* the best; write its topology with --output FILE: {best.name}")
    else:
        console.print(f"\n* the best: tandem serve MODEL --topology {options.output}")


def _progress_of(
    bar: ProgressBar, num_before: int, name: str, total: int | None
) -> Callable[[int], None]:
    """Return the function that shows the requests of a layout, after `num_before` layouts."""

    def finished(num_finished: int) -> None:
        if num_finished % PROGRESS_EVERY == 0:
            share = min(num_finished / total, 1.0) if total else 0.0
            bar.update(num_before + share, f"{name}: {num_finished} requests")

    return finished
