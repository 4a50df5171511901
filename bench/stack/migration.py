"""What clients see of workers that are killed, ended or stopped while they answer.

python -m tandem.bench.stack.migration --output migration.json
"""

import asyncio
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.bench.load.report import utc_now, write_document
from tandem.bench.report.console import output_console
from tandem.bench.stack.__main__ import Target, print_results, results_json
from tandem.bench.stack.migration_cluster import DRAIN_TIMEOUT_S, MODELS, SampleCluster
from tandem.bench.stack.migration_streams import Stream, StreamMaker, Streams
from tandem.runtime.errors import ServiceError, TandemError

NUM_PIECES = 5  # of text that every stream has before anything happens
TARGETS: Mapping[str, Target] = {
    "num_wrong": Target("streams with a wrong, missing or repeated token", "", 0.0),
    "num_moved": Target("streams that went on elsewhere", ""),
    "killed_gap_p50_ms": Target("silence at the switch after kill -9, p50", "ms"),
    "killed_gap_p99_ms": Target("silence at the switch after kill -9, p99", "ms", 200.0),
    "ended_gap_p50_ms": Target("silence at the switch after SIGTERM, p50", "ms"),
    "ended_gap_p99_ms": Target("silence at the switch after SIGTERM, p99", "ms", 200.0),
    "stopped_gap_p50_ms": Target("silence at the switch after SIGSTOP, p50", "ms"),
    "stopped_gap_p99_ms": Target("silence at the switch after SIGSTOP, p99", "ms", 3000.0),
    "others_gap_p99_ms": Target("longest silence of streams that stayed, p99", "ms"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much goes on at once."""

    num_streams: int = 500
    num_tokens: int = 120
    token_interval_ms: float = 50.0

    def how(self) -> dict[str, str]:
        """The conditions, for those who read the figures."""
        return {
            "cluster": "2 models, 2 sample engines each (no model: known tokens), one frontend; "
            "client and all of it on this machine",
            "streams": f"{self.num_streams} at once, {self.num_tokens} tokens each, one every "
            f"{self.token_interval_ms:g} ms; the text of each is compared with what it must be",
            "strikes": "when every stream has begun: first kill -9 of one worker and SIGTERM of "
            f"one of the other model, which drains {DRAIN_TIMEOUT_S:g} s in all and gives up "
            "the rest; then, with new streams, SIGSTOP of a worker",
            "silence": "the longest time between two pieces of text after the strike, of streams "
            "that the struck worker had begun; the time of a token is in it",
        }


@dataclass(frozen=True, slots=True)
class Struck:
    """A worker, what is done to it, and the prefix of its figures."""

    worker: str
    number: signal.Signals
    label: str


KILLED_AND_ENDED = (
    Struck(f"{MODELS[0]}-0", signal.SIGKILL, "killed"),
    Struck(f"{MODELS[1]}-0", signal.SIGTERM, "ended"),
)
STOPPED = (Struck(f"{MODELS[0]}-1", signal.SIGSTOP, "stopped"),)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the streams of one strike."""

    streams: Sequence[Stream]
    began_on: Mapping[str, Sequence[Stream]]  # label of the struck worker |-> its streams
    struck_at_s: float  # perf_counter

    @property
    def num_wrong(self) -> int:
        return sum(not stream.is_right for stream in self.streams)

    def gaps_ms(self, label: str) -> list[float]:
        """The longest silence after the strike of each stream that the struck worker began."""
        return [stream.gap_s(self.struck_at_s) * 1e3 for stream in self.began_on[label]]

    def other_gaps_ms(self) -> list[float]:
        """The same of all streams that no struck worker began."""
        moved = {id(stream) for streams in self.began_on.values() for stream in streams}
        stayed = [stream for stream in self.streams if id(stream) not in moved]
        return [stream.gap_s(self.struck_at_s) * 1e3 for stream in stayed]


async def strike(
    cluster: SampleCluster, maker: StreamMaker, plan: Plan, struck: Sequence[Struck]
) -> Outcome:
    """Streams of both models, and signals to workers in the middle of them.

    Raises ServiceError when a struck worker had no stream.
    """
    ids = {each.label: await cluster.instance_id(each.worker) for each in struck}
    models = [MODELS[i % len(MODELS)] for i in range(plan.num_streams)]
    load = Streams(cluster.url, [maker.make(each, plan.num_tokens) for each in models], NUM_PIECES)
    running = asyncio.create_task(load.run())
    await load.well_begun.wait()
    struck_at_s = time.perf_counter()
    for each in struck:
        cluster.send_signal(each.worker, each.number)
    await running
    began_on = {
        label: [stream for stream in load.streams if stream.instance_id == instance_id]
        for label, instance_id in ids.items()
    }
    if not all(began_on.values()):
        raise ServiceError("a worker had no stream when it was struck")
    return Outcome(load.streams, began_on, struck_at_s)


async def measure_round(plan: Plan, run_dir: Path, say: Console) -> dict[str, float]:
    """Both strikes once, on a cluster of their own. `run_dir` is an existing folder.

    Wrong streams are told of at once.
    """
    maker = StreamMaker()
    async with SampleCluster(run_dir, plan.token_interval_ms) as cluster:
        first = await strike(cluster, maker, plan, KILLED_AND_ENDED)
        for each in KILLED_AND_ENDED:
            await cluster.workers[each.worker].wait()
            await cluster.start_worker(each.worker)
        await cluster.ready()
        second = await strike(cluster, maker, plan, STOPPED)
    figures = {"num_wrong": float(first.num_wrong + second.num_wrong), "num_moved": 0.0}
    for outcome in (first, second):
        for stream in outcome.streams:
            if not stream.is_right:
                say.print(f"[red]wrong:[/] {escape(stream.description)}", soft_wrap=True)
        for label, streams in outcome.began_on.items():
            figures["num_moved"] += len(streams)
            gaps = outcome.gaps_ms(label)
            figures[f"{label}_gap_p50_ms"] = statistics.median(gaps)
            figures[f"{label}_gap_p99_ms"] = _p99(gaps)
    figures["others_gap_p99_ms"] = _p99(first.other_gaps_ms() + second.other_gaps_ms())
    return figures


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


async def run_rounds(
    plan: Plan, num_rounds: int, run_dir: Path, say: Console
) -> list[dict[str, float]]:
    """All rounds, each on a cluster of its own."""
    rounds = []
    for index in range(num_rounds):
        say.print(f"round {index + 1} of {num_rounds}")
        folder = run_dir / f"round-{index + 1}"
        folder.mkdir()
        rounds.append(await measure_round(plan, folder, say))
    return rounds


def main(
    streams: Annotated[int, typer.Option(min=8, help="streams at once")] = 500,
    tokens: Annotated[int, typer.Option(min=20, help="tokens of each answer")] = 120,
    token_interval_ms: Annotated[float, typer.Option(min=1, help="between tokens")] = 50.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which medians are shown")] = 3,
    output: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
) -> None:
    """Kill, end and stop workers under streams of known tokens, and measure what clients see."""
    started_at = utc_now()
    say = Console(stderr=True, highlight=False)
    plan = Plan(streams, tokens, token_interval_ms)
    with tempfile.TemporaryDirectory(prefix="tandem-migration-") as folder:
        try:
            measured = uvloop.run(run_rounds(plan, rounds, Path(folder), say))
        except TandemError as error:
            say.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(1) from error
    results = results_json(measured, TARGETS, plan.how())
    print_results(output_console(), results)
    settings = msgspec.to_builtins(plan) | {"rounds": rounds}
    write_document(output, "tandem.bench.stack.migration", settings, started_at, results)
    if any(figures["num_wrong"] for figures in measured):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
