"""Tandem and other engines on this machine's CPU, each behind its own OpenAI server, in turns.

python -m tandem.bench.engines --python vllm=/opt/vllm/bin/python --output compared.json
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tandem.bench.engines.load import Load, Prompts, Turn, take_turn
from tandem.bench.engines.presets import (
    DTYPES,
    PLACEHOLDERS,
    PRESETS,
    Case,
    Dtype,
    Engine,
    make_cases,
    make_engines,
)
from tandem.bench.engines.process import EngineProcess
from tandem.bench.engines.report import Turns, figures_of_case
from tandem.bench.load.workload import SyntheticWorkload
from tandem.bench.report.console import say
from tandem.bench.report.figures import Figure
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.models.random_model import PRESETS as SHAPES
from tandem.runtime.errors import ConfigError, TandemError

MODULE = "tandem.bench.engines"
MIXED_CONCURRENCY = 8
MIXED_STDDEV_SHARE = 0.25

HOW = {
    "model": "random weights, Qwen3 of 16 layers (hidden 768, 12 query and 4 KV heads of 64, "
    "vocabulary 32,768), whose answers are one plain character per token",
    "alone": "one request at a time: TTFT, and ITL as the time per output token; medians of "
    "requests",
    "mixed": "closed loop of 8 with mixed lengths, the same for every engine: tokens/s, ITL, and "
    "what a whole request takes; medians of requests, or their mean where the label has it",
    "gap": "between neighboring output events, however many tokens they hold",
    "ready": "from the start of the process to the first answered request",
    "work": "every answer has the length asked for and no prompt was sent before, or the run fails",
    "turns": "all servers stay up; the others are stopped in each turn by SIGSTOP. Within a "
    "round engines take turns load by load, and every other round in reverse order",
    "CPU time": "of all processes of the server during the load",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Compare engines on this machine's CPU: many minutes, in which it should do nothing else."""

    engine: tuple[str, ...] = option(
        tuple(PRESETS),
        f"engines, ours first: {', '.join(PRESETS)}, or one with a --command",
    )
    python: tuple[str, ...] = option((), "NAME=PATH: the interpreter that has this engine")
    command: tuple[str, ...] = option(
        (),
        "NAME=COMMAND: starts a server on 127.0.0.1 that takes token ids and calls its model "
        f"`measured`, with {PLACEHOLDERS} filled in",
    )
    model: Path | None = option(None, "a model folder of your own")
    dtype: tuple[Dtype, ...] = option(DTYPES, "of weights and computing")
    threads: tuple[int, ...] = option((1, 2), "compute threads", least=1)
    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    requests: int = option(16, "of the mixed load, per round", least=1)
    alone_requests: int = option(3, "one at a time, per round", least=1)
    input_tokens: int = option(512, "of a prompt; mixed: mean", least=1)
    output_tokens: int = option(64, "of an answer; mixed: mean", least=2)
    start_timeout_s: float = option(600.0, "longest start", least=1)
    seed: int = option(0, "of lengths and prompts")
    run_dir: Path | None = option(
        None, "a folder for models and logs that stay; else a temporary one"
    )
    output: Path | None = option(None, "write everything as JSON")

    def loads(self) -> tuple[Load, Load]:
        """Return the loads `alone` and `mixed`."""
        lengths = (self.input_tokens, self.output_tokens)
        input_stddev, output_stddev = (MIXED_STDDEV_SHARE * mean for mean in lengths)
        mixed = SyntheticWorkload(*lengths, input_stddev, output_stddev)
        return (
            Load("alone", 1, self.alone_requests, SyntheticWorkload(*lengths)),
            Load("mixed", MIXED_CONCURRENCY, self.requests, mixed),
        )


async def compare(
    engines: Sequence[Engine], case: Case, model: Path, options: Options, run_dir: Path
) -> list[Figure]:
    """Start every engine, measure them in turns, and end them. Raises ServiceError."""
    rounds: dict[str, list[Turns]] = {engine.name: [] for engine in engines}
    prompts = Prompts(model)
    async with contextlib.AsyncExitStack() as stack:
        processes: list[EngineProcess] = []
        for engine in engines:
            process = EngineProcess(engine, case, model, run_dir)
            stack.push_async_callback(process.stop)
            await process.wait_until_ready(options.start_timeout_s)
            say(
                f"{case.label}: {engine.name} was ready after {process.ready_s:.1f} s, "
                f"CPU {process.cpu_s():.1f} s"
            )
            process.pause()
            processes.append(process)
        for index in range(options.rounds):
            say(f"{case.label}: round {index + 1} of {options.rounds}")
            for name, turns in (await take_round(processes, options, index, prompts)).items():
                rounds[name].append(turns)
    ready_s = {process.engine.name: process.ready_s for process in processes}
    return list(figures_of_case(case.label, ready_s, rounds))


async def take_round(
    processes: Sequence[EngineProcess], options: Options, index: int, prompts: Prompts
) -> dict[str, dict[str, Turn]]:
    """Measure every engine once under every load. All are stopped before and after."""
    taken: dict[str, dict[str, Turn]] = {process.engine.name: {} for process in processes}
    for load in options.loads():
        for process in processes if index % 2 == 0 else reversed(processes):
            name = process.engine.name
            content = f"{options.seed}/{index}/{load.name}/{name}"
            with process.running():
                turn = await take_turn(process, load, prompts, content, options.seed + index)
            taken[name][load.name] = turn
            say(f"  {load.name}, {name}: {turn.line()}")
    return taken


async def measure(options: Options, run_dir: Path) -> list[Figure]:
    """Measure case after case; one that fails ends the comparison and is named."""
    engines = make_engines(options.engine, options.python, options.command)
    cases = make_cases(options.dtype, options.threads)
    if options.model is not None and not options.model.is_dir():
        raise ConfigError(f"--model {options.model}: no such folder")
    run_dir = options.run_dir or run_dir
    figures: list[Figure] = []
    for case in cases:
        folder = options.model or run_dir / case.dtype
        case_dir = run_dir / f"{case.dtype}-{case.threads}"
        case_dir.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            write_near_zero_model(folder, replace(SHAPES["small"], dtype=case.dtype))
        try:
            figures += await compare(engines, case, folder, options, case_dir)
        except TandemError as error:
            return [*figures, Figure(case.label, case.label, "", failure=error.message)]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, HOW, partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
