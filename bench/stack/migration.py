"""The clients' view of workers that are killed, ended or stopped while they answer.

python -m tandem.bench.stack.migration --output migration.json
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tandem.bench.report.console import say
from tandem.bench.report.figures import Figure, at_most, measured, percentile
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import in_rounds, run_program
from tandem.bench.stack.migration_cluster import DRAIN_TIMEOUT_S, MODELS, SampleCluster
from tandem.bench.stack.migration_streams import Stream, StreamMaker, Streams
from tandem.runtime.errors import ServiceError

MODULE = "tandem.bench.stack.migration"
NUM_PIECES = 5  # of text that every stream has before anything happens


@dataclass(frozen=True, slots=True)
class Struck:
    """A worker and the signal that it gets; the prefix, the words and the limit of its figures."""

    worker: str
    number: signal.Signals
    label: str
    words: str
    limit_ms: float  # of the p99


KILLED_AND_ENDED = (
    Struck(f"{MODELS[0]}-0", signal.SIGKILL, "killed", "kill -9", 200.0),
    Struck(f"{MODELS[1]}-0", signal.SIGTERM, "ended", "SIGTERM", 200.0),
)
STOPPED = (Struck(f"{MODELS[0]}-1", signal.SIGSTOP, "stopped", "SIGSTOP", 3000.0),)
FIGURES = (
    Figure("num_wrong", "streams with a wrong, missing or repeated token", "", target=at_most(0.0)),
    Figure("num_moved", "streams that continued on another worker", ""),
    *(
        Figure(
            f"{each.label}_gap_{mark}_ms", f"silence after {each.words}, {mark}", "ms", (), target
        )
        for each in (*KILLED_AND_ENDED, *STOPPED)
        for mark, target in (("p50", None), ("p99", at_most(each.limit_ms)))
    ),
    Figure("others_gap_p99_ms", "longest silence of streams that stayed, p99", "ms"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """Kill, end and stop workers under streams of known tokens, and measure the clients' view."""

    streams: int = option(500, "streams at once", least=8)
    tokens: int = option(120, "tokens of each answer", least=20)
    token_interval_ms: float = option(50.0, "milliseconds between tokens", least=1)
    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    output: Path | None = option(None, "write everything as JSON")

    def how(self) -> dict[str, str]:
        """Return the definitions of the figures."""
        return {
            "cluster": "2 models, 2 sample engines each (no model: known tokens), one frontend; "
            "client and all of it on this machine",
            "streams": f"{self.streams} at once, {self.tokens} tokens each, one every "
            f"{self.token_interval_ms:g} ms; the text of each is compared with the expected one",
            "strikes": "when every stream has begun: first kill -9 of one worker and SIGTERM of "
            f"one of the other model, which drains {DRAIN_TIMEOUT_S:g} s in all and gives up "
            "the rest; then, with new streams, SIGSTOP of a worker",
            "silence": "the longest time between two pieces of text after the strike, of streams "
            "that the struck worker had begun; the time of a token is in it",
        }


async def strike(
    cluster: SampleCluster, maker: StreamMaker, options: Options, struck: Sequence[Struck]
) -> list[Stream]:
    """Run streams of both models, and send signals to workers in the middle of them.

    Raises ServiceError when a struck worker had no stream.
    """
    labels = {await cluster.instance_id(each.worker): each.label for each in struck}
    models = [MODELS[i % len(MODELS)] for i in range(options.streams)]
    load = Streams(cluster.url, [maker.make(each, options.tokens) for each in models], NUM_PIECES)
    running = asyncio.create_task(load.run())
    await load.well_begun.wait()
    struck_at_s = time.perf_counter()
    for each in struck:
        cluster.send_signal(each.worker, each.number)
    await running
    for stream in load.streams:
        stream.struck = labels.get(stream.instance_id, "")
        stream.silence_ms = stream.gap_s(struck_at_s) * 1e3
    if not {stream.struck for stream in load.streams} >= {*labels.values()}:
        raise ServiceError("a worker had no stream when it was struck")
    return load.streams


async def measure_round(options: Options, run_dir: Path) -> dict[str, float]:
    """Measure both strikes once, on a cluster of their own. Print wrong streams at once."""
    maker = StreamMaker()
    async with SampleCluster(run_dir, options.token_interval_ms) as cluster:
        streams = await strike(cluster, maker, options, KILLED_AND_ENDED)
        for each in KILLED_AND_ENDED:
            await cluster.workers[each.worker].wait()
            await cluster.start_worker(each.worker)
        await cluster.ready()
        streams += await strike(cluster, maker, options, STOPPED)
    wrong = [stream for stream in streams if not stream.is_right]
    for stream in wrong:
        say(f"wrong: {stream.description}")
    others_ms = [stream.silence_ms for stream in streams if not stream.struck]
    values = {
        "num_wrong": float(len(wrong)),
        "num_moved": float(len(streams) - len(others_ms)),
        "others_gap_p99_ms": percentile(others_ms, 0.99),
    }
    for each in (*KILLED_AND_ENDED, *STOPPED):
        gaps_ms = [stream.silence_ms for stream in streams if stream.struck == each.label]
        values[f"{each.label}_gap_p50_ms"] = percentile(gaps_ms, 0.5)
        values[f"{each.label}_gap_p99_ms"] = percentile(gaps_ms, 0.99)
    return values


async def measure(options: Options, run_dir: Path) -> list[Figure]:
    """Measure all rounds; wrong streams are a failure."""
    rounds = await in_rounds(options.rounds, run_dir, partial(measure_round, options))
    wrong, *others = measured(FIGURES, rounds)
    if any(wrong.samples):
        wrong = msgspec.structs.replace(wrong, failure=f"wrong streams by round: {wrong.samples}")
    return [wrong, *others]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, options.how(), partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
