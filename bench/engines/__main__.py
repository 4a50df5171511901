"""Tandem and other engines on this machine's CPU, each behind its own OpenAI server, in turns.

python -m tandem.bench.engines --python vllm=/opt/vllm/bin/python --output compared.json
"""

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.bench.engines.load import Load, Prompts, Turn, figures_of, take_turn
from tandem.bench.engines.presets import (
    DTYPES,
    PLACEHOLDERS,
    PRESETS,
    Case,
    Engine,
    make_cases,
    make_engines,
)
from tandem.bench.engines.process import EngineProcess
from tandem.bench.engines.report import KINDS, CaseResult, print_case, summary_lines
from tandem.bench.load.report import document, utc_now
from tandem.bench.report.console import output_console
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.models.random_model import ModelShape
from tandem.runtime.errors import TandemError

SHAPE = ModelShape(
    vocab_size=32_768,
    hidden_size=768,
    num_layers=16,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=2048,
)
MIXED_CONCURRENCY = 8
MIXED_STDDEV_SHARE = 0.25
DEFAULT_ENGINES = ("tandem", "transformers", "vllm")
DEFAULT_THREADS = (1, 2)

HOW = {
    "model": "random weights, Qwen3 of 16 layers (hidden 768, 12 query and 4 KV heads of 64, "
    "vocabulary 32,768), whose answers are one plain character per token",
    "alone": "one request at a time: TTFT, and ITL as the time per output token; medians of "
    "requests",
    "mixed": "closed loop of 8 with mixed lengths, the same for every engine: tokens/s, ITL, and "
    "what a whole request takes; medians of requests, or their mean where it says so",
    "gap": "between neighbouring output events, whatever they hold: median and p99",
    "ready": "from the start of the process to the first answered request",
    "work": "every answer has the length asked for and no prompt was sent before, or the run fails",
    "turns": "all servers stay up; those whose turn it isn't are stopped by SIGSTOP. Within a "
    "round engines take turns load by load, and every other round in reverse order",
    "CPU time": "of all processes of the server during the load; cores busy is that per second",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured of each case."""

    rounds: int
    loads: tuple[Load, ...]
    start_timeout_s: float
    seed: int


def make_plan(
    rounds: int, requests: int, alone: int, lengths: tuple[int, int], timeout_s: float, seed: int
) -> Plan:
    """The two loads at these counts; `lengths` are tokens in and out."""
    loads = (
        Load("alone", 1, alone, *lengths),
        Load("mixed", MIXED_CONCURRENCY, requests, *lengths, stddev_share=MIXED_STDDEV_SHARE),
    )
    return Plan(rounds, loads, timeout_s, seed)


async def compare(
    engines: Sequence[Engine], case: Case, model: Path, plan: Plan, run_dir: Path, say: Console
) -> CaseResult:
    """Starts every engine, measures them in turns, and ends them. Raises ServiceError."""
    rounds: dict[str, dict[str, list[float]]] = {
        engine.name: {figure: [] for figure in KINDS} for engine in engines
    }
    prompts = Prompts(model)
    async with contextlib.AsyncExitStack() as stack:
        processes: list[EngineProcess] = []
        for engine in engines:
            process = EngineProcess(engine, case, model, run_dir)
            stack.push_async_callback(process.stop)
            await process.wait_until_ready(plan.start_timeout_s)
            say.print(
                f"{case.label}: {engine.name} was ready after {process.ready_s:.1f} s, "
                f"CPU {process.cpu_s():.1f} s"
            )
            rounds[engine.name]["ready_s"].append(process.ready_s)
            process.pause()
            processes.append(process)
        for index in range(plan.rounds):
            say.print(f"{case.label}: round {index + 1} of {plan.rounds}")
            taken = await take_round(processes, plan, index, prompts, say)
            for name, turns in taken.items():
                for figure, value in figures_of(turns).items():
                    rounds[name][figure].append(value)
    return CaseResult(case, rounds)


async def take_round(
    processes: Sequence[EngineProcess], plan: Plan, index: int, prompts: Prompts, say: Console
) -> dict[str, dict[str, Turn]]:
    """Every engine once under every load. All are stopped before and after."""
    taken: dict[str, dict[str, Turn]] = {process.engine.name: {} for process in processes}
    for load in plan.loads:
        for process in processes if index % 2 == 0 else reversed(processes):
            name = process.engine.name
            content = f"{plan.seed}/{index}/{load.name}/{name}"
            with process.running():
                turn = await take_turn(process, load, prompts, content, plan.seed + index)
            taken[name][load.name] = turn
            say.print(f"  {load.name}, {name}: {turn.line()}")
    return taken


async def compare_cases(
    engines: Sequence[Engine],
    cases: Sequence[Case],
    model: Path | None,
    plan: Plan,
    run_dir: Path,
    say: Console,
    results: list[CaseResult],
) -> None:
    """Case after case into `results`; without a `model` a random one is written for each dtype."""
    for case in cases:
        folder = model or run_dir / case.dtype
        if not folder.exists():
            write_near_zero_model(folder, replace(SHAPE, dtype=case.dtype))
        case_dir = run_dir / f"{case.dtype}-{case.threads}"
        case_dir.mkdir(exist_ok=True)
        results.append(await compare(engines, case, folder, plan, case_dir, say))


def main(
    engine: Annotated[
        list[str] | None,
        typer.Option(help=f"engines, ours first: {', '.join(PRESETS)}, or one with a --command"),
    ] = None,
    python: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: the interpreter that has this engine")
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=COMMAND: starts a server on 127.0.0.1 that takes token ids and calls its "
            f"model `measured`, with {PLACEHOLDERS} filled in"
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="a model folder of your own")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16; both")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="1 and 2 by default")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="of which medians are shown")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="of the mixed load, per round")] = 16,
    alone_requests: Annotated[int, typer.Option(min=1, help="one at a time, per round")] = 3,
    input_tokens: Annotated[int, typer.Option(min=1, help="of a prompt; mixed: mean")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="of an answer; mixed: mean")] = 64,
    start_timeout_s: Annotated[float, typer.Option(min=1, help="longest start (s)")] = 600.0,
    seed: Annotated[int, typer.Option(help="of lengths and prompts")] = 0,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="a folder for models and logs that stay; else a temporary one"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
) -> None:
    """Compare engines on this machine's CPU: many minutes, in which it should do nothing else."""
    say = Console(stderr=True, highlight=False)
    started_at = utc_now()
    results: list[CaseResult] = []
    plan = make_plan(
        rounds, requests, alone_requests, (input_tokens, output_tokens), start_timeout_s, seed
    )
    with tempfile.TemporaryDirectory(prefix="tandem-compare-") as temporary:
        folder = run_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        failure: TandemError | None = None
        engines: list[Engine] = []
        try:
            engines = make_engines(engine or DEFAULT_ENGINES, python or [], command or [])
            cases = make_cases(dtype or DTYPES, threads or DEFAULT_THREADS)
            uvloop.run(compare_cases(engines, cases, model, plan, folder, say, results))
        except TandemError as error:
            failure = error
            say.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
    if results:
        show(results, engines, plan, model, started_at, output)
    if failure is not None:
        raise typer.Exit(1) from failure


def show(
    results: Sequence[CaseResult],
    engines: Sequence[Engine],
    plan: Plan,
    model: Path | None,
    started_at: datetime,
    output: Path | None,
) -> None:
    """What was measured, as tables, and as JSON where `output` says."""
    out = output_console()
    for result in results:
        print_case(out, result)
    for line in [*summary_lines(results), *(f"{part}: {text}" for part, text in HOW.items())]:
        out.print(line, soft_wrap=True, markup=False)
    if output is not None:
        settings = {
            "plan": msgspec.to_builtins(plan),
            "engines": [msgspec.to_builtins(one) for one in engines],
            "model": str(model) if model else asdict(SHAPE),
        }
        write_json(output, settings, started_at, results)


def write_json(
    path: Path, settings: Mapping[str, Any], started_at: datetime, results: Sequence[CaseResult]
) -> None:
    """Everything that was measured, and what it was measured on."""
    whole = document(
        command=["python", "-m", "tandem.bench.engines", *sys.argv[1:]],
        settings=settings,
        started_at=started_at,
        results={"how": HOW, "cases": [result.to_json() for result in results]},
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")


if __name__ == "__main__":
    typer.run(main)
