"""The host's time of a decode step of the whole engine, around a model that costs next to nothing.

`python -m tandem.bench.engine.near_zero` measures the engine's own thread, which launches steps and
collects them, with its real runner and with asyncio beside it.
"""

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from tandem.bench.report.figures import Figure, Target, at_most
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.core.loop import EngineLoop
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import Sequence as EngineSequence
from tandem.engine.step.decode_graphs import Recorded
from tandem.runtime.wire.messages import SamplingParams, StopConditions

MODULE = "tandem.bench.engine.near_zero"
HOW = {
    "host's time": "CPU time of the engine's thread per decode step, from scheduling to handing "
    "the tokens to asyncio and waiting until it took them; median of a round's steps, of rounds",
    "computed": "every operation of a model of one layer and 32 numbers is called step by step, "
    "with one compute thread",
    "replayed": "steps are recorded as on a GPU, and their replays do nothing; with overlap",
    "greedy, drawn": "temperature 0, and 0.7 with top_p 0.9",
}
PROMPT = [65, 66, 67, 68]
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
}
TARGETS: dict[int, Target] = {1: at_most(250.0), 64: at_most(600.0)}  # us, by sequences
T = TypeVar("T")


class _RecordsNothing:
    """A Recorder whose replays take no time: results stay those of the first call."""

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        return Recorded(lambda: None, run())

    def held_bytes(self) -> int:
        return 0


class _TimedEngine(Engine):
    """An engine that notes the CPU time of its thread, in seconds, at the launch of each step."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        super().__init__(config, runner)
        self.launched_at: list[float] = []

    def launch(self) -> None:
        self.launched_at.append(time.thread_time())
        super().launch()


def make_engine(model: Path, *, replayed: bool, device: str = "cpu") -> _TimedEngine:
    """Return an engine over the model in a folder; `replayed` as HOW says."""
    config = EngineConfig(model=str(model), device=device, threads=1, overlap=replayed or None)
    runner = ModelRunner(config, _RecordsNothing() if replayed else None)
    return _TimedEngine(runner.config, runner)


async def measure(
    engine: _TimedEngine, num_seqs: int, num_steps: int, sampling: SamplingParams
) -> float:
    """Return the microseconds of CPU time that the engine's thread takes for a decode step."""
    waiting = {f"r{i}" for i in range(num_seqs)}
    is_over = asyncio.Event()

    def on_outputs(outputs: list[SequenceOutput]) -> None:
        if waiting:
            waiting.difference_update(output.request_id for output in outputs)
            if not waiting:  # what follows are decode steps
                engine.launched_at.clear()
        elif len(engine.launched_at) > num_steps:
            is_over.set()

    def add(engine: Engine) -> None:
        for request_id in sorted(waiting):
            stop = StopConditions(max_tokens=2 * num_steps + 256, ignore_eos=True)
            engine.add(EngineSequence(request_id, list(PROMPT), len(PROMPT), sampling, stop))

    def end(engine: Engine) -> None:
        for i in range(num_seqs):
            engine.abort(f"r{i}")

    loop = EngineLoop(engine, on_outputs)
    await loop.start()
    try:
        await loop.call(add)
        await is_over.wait()
        await loop.call(end)
    finally:
        await loop.stop()
    starts_s = engine.launched_at[: num_steps + 1]
    return statistics.median(b - a for a, b in pairwise(starts_s)) * 1e6


async def figures(model: Path, num_steps: int, num_rounds: int, device: str) -> list[Figure]:
    """Measure steps of 1 and 64 sequences, computed and replayed, greedy and drawn, in turns."""
    write_near_zero_model(model)
    engines = {"computed": make_engine(model, replayed=False, device=device)}
    if engines["computed"].runner.device_kind == "cpu":
        engines["replayed"] = make_engine(model, replayed=True)
    cases = list(itertools.product(engines, SAMPLING, TARGETS))
    found: dict[tuple[str, str, int], list[float]] = {case: [] for case in cases}
    for _, case in itertools.product(range(num_rounds), cases):
        kind, drawing, num_seqs = case
        steps_us = await measure(engines[kind], num_seqs, num_steps, SAMPLING[drawing])
        found[case].append(steps_us)
    return [
        Figure(
            f"{kind}_{drawing}_{num_seqs}",
            f"host's time of a step, {kind}, {drawing}, {num_seqs} running",
            "us",
            tuple(found[kind, drawing, num_seqs]),
            TARGETS[num_seqs],
        )
        for kind, drawing, num_seqs in cases
    ]


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the host's time of the engine's decode steps around a model that costs nothing."""

    steps: int = option(300, "decode steps of a measurement", least=1)
    rounds: int = option(5, "rounds, of which medians are shown", least=1)
    device: str = option("cpu", "cpu, or a GPU, whose graphs are then replayed: cuda:0")
    output: Path | None = option(None, "write everything as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times."""
    options = parse(Options, MODULE, arguments)
    counts = options.steps, options.rounds, options.device
    return run_program(MODULE, options, HOW, lambda folder: figures(folder / "model", *counts))


if __name__ == "__main__":
    sys.exit(main())
