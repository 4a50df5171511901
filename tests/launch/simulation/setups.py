"""Setups and loads for tests of the simulation, with costs that are easy to add up."""

from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.options import BenchOptions
from tandem.decode.config import DisaggConfig
from tandem.launch.simulation.cluster import Setup, VirtualCluster
from tandem.launch.simulation.layout import Layout, layouts_of
from tandem.launch.simulation.load import PlannedLoad
from tandem.launch.simulation.worker import HandoffTime, WorkerFigures
from tandem.prefill.config import PrefillConfig
from tandem.router.config import RouterConfig
from tandem.runtime.wire.cluster_messages import StepCosts

# A step takes 10 ms and 1 ms per decode; prompts add 5 ms and 0.1 ms per token.
COSTS = StepCosts((0.010, 0.001, 0.0), (0.005, 0.0001, 0.0), 1.0, 2000, 1000)
FIGURES = WorkerFigures(COSTS, num_blocks=512, block_size=16)


def setup_of(
    disagg: DisaggConfig | None = None,
    *,
    prefill: PrefillConfig | None = None,
    figures: WorkerFigures = FIGURES,
    seed: int = 0,
) -> Setup:
    return Setup(
        figures,
        disagg or DisaggConfig.model_validate({}),
        prefill or PrefillConfig.model_validate({}),
        RouterConfig.model_validate({}),
        HandoffTime(0.002, 0.00001),
        seed,
    )


def load_of(seed: int = 0, **options: Any) -> PlannedLoad:
    return PlannedLoad(BenchOptions(**options), seed, FIGURES.block_size, FIGURES.max_tokens)


def layout(name: str, num_workers: int) -> Layout:
    return next(each for each in layouts_of(num_workers) if each.name == name)


def simulate(chosen: Layout, setup: Setup, load: PlannedLoad) -> list[RequestRecord]:
    """Run a load, check that every worker ended empty, and return the records."""
    cluster = VirtualCluster(chosen, setup)
    outcome = cluster.run(load, lambda num_finished: None)
    for worker in cluster.workers:
        worker.scheduler.check_invariants()
        assert worker.pool.num_held == 0 and not worker.own_prompts
    return outcome.records


def write_trace(path: Path, *entries: tuple[float, int, int, list[int]]) -> Path:
    """Write a trace of (ms, prompt tokens, answer tokens, hash ids)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [msgspec.json.encode(dict(zip(names, entry, strict=True))) for entry in entries]
    path.write_bytes(b"\n".join(lines))
    return path
