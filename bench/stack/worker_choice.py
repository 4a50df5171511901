"""A frontend's choice among many simulated workers, by CPU time.

python -m tandem.bench.stack.worker_choice MOONCAKE_TRACE --output choice.json
"""

import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.bench.load.trace import read_trace
from tandem.bench.load.trace_formats import TraceEntry
from tandem.bench.report.figures import Figure, at_most
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.router.config import RouterConfig
from tandem.router.decision import RoutingDecision
from tandem.router.policy import Router
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.cluster_messages import KvEvent, LoadReport, StepCosts

MODULE = "tandem.bench.stack.worker_choice"
TARGET = at_most(100.0)
GROWTH_TARGET = at_most(16.0)
_COSTS = StepCosts((4e-3, 3e-5, 1e-8), (2e-3, 2.5e-5, 2e-9), 0.05, 8192, 2048)
_BLOCK_TOKENS = 16
_REPORTS_PER_CHOICE = 4  # four a second of each worker, at a request a second and worker
_IN_FLIGHT = 4  # requests per worker
_BLOCKS_HELD = 2000  # of a worker, in the index

HOW = {
    "choice": "CPU time of Router.heeds_prefix and Router.choose for one prompt of the trace among "
    "workers with costs that differ by 4 %, four requests in flight at each; with no blocks held, "
    f"and with an index that is full with {_BLOCKS_HELD} per worker, of which the oldest give way",
    "request": "the same with the notes of a request's start, first token and end, and with "
    f"{_REPORTS_PER_CHOICE} load reports",
    "growth": "resident memory at the end, less that after the first half",
}


@dataclass(slots=True)
class Choices:
    """The seconds and the memory of many choices."""

    choice_s: float = 0.0
    request_s: float = 0.0
    growth_bytes: int = 0


class _Fleet:
    """Workers that hold what was sent to them, as far as the index has room."""

    def __init__(self, num_workers: int, *, holds_blocks: bool) -> None:
        self._rng = random.Random(1)
        self.names = [f"{number:016x}" for number in range(num_workers)]
        self._holds_blocks = holds_blocks
        self._num_events = dict.fromkeys(self.names, 0)
        self._costs = [self._learned(self._rng.uniform(0.98, 1.02)) for _ in self.names]
        config = RouterConfig(max_index_entries=_BLOCKS_HELD * num_workers)
        self.router = Router(config, random.Random(2))
        for number, name in enumerate(self.names):
            self.report(number)
            if holds_blocks:
                self._stored(name, [self._rng.randbytes(16) for _ in range(_BLOCKS_HELD)])

    def _learned(self, factor: float) -> StepCosts:
        per_step_s, per_token_s, per_position_s = _COSTS.prompt_s
        prompt_s = (per_step_s * factor, per_token_s * factor, per_position_s * factor)
        return StepCosts(_COSTS.decode_s, prompt_s, 0.05, 8192, 2048)

    def report(self, number: int) -> None:
        num_decodes = self._rng.randrange(_IN_FLIGHT)
        report = LoadReport(
            self.names[number], "e", "both", num_decodes, 0, self._rng.randrange(2000), 10_000,
            5_000, 3_000, num_decodes, 1000 * num_decodes, self._costs[number],
        )  # fmt: skip
        self.router.update_load(report, _BLOCK_TOKENS)

    def store(self, decision: RoutingDecision, hashes: list[bytes]) -> None:
        if self._holds_blocks:
            self._stored(decision.instance_id, hashes)

    def _stored(self, name: str, hashes: list[bytes]) -> None:
        self._num_events[name] += 1
        self.router.index.apply(KvEvent(name, "e", self._num_events[name], hashes))


def choose_all(
    entries: Sequence[TraceEntry], num_workers: int, num_choices: int, *, holds_blocks: bool
) -> Choices:
    """Send `num_choices` prompts, the trace's again and again. Raise ConfigError for a leak."""
    fleet = _Fleet(num_workers, holds_blocks=holds_blocks)
    router, names, total = fleet.router, fleet.names, Choices()
    process, waiting, running = psutil.Process(), deque[str](), deque[str]()
    num_each = max(1, _IN_FLIGHT * num_workers // 2)  # before and after their first token
    for number, entry in zip(range(num_choices), itertools.cycle(entries), strict=False):
        if number == num_choices // 2:
            total.growth_bytes = -process.memory_info().rss
        # Hashes are new objects every time, as they are off the tokens
        hashes = [hash_id.to_bytes(16, "little") for hash_id in entry.hash_ids]
        begun_s = time.process_time()
        decision = router.choose(
            list(names), hashes if router.heeds_prefix(names) else [], len(hashes)
        )
        chosen_s = time.process_time()
        waiting.append(str(number))
        router.started(waiting[-1], decision, len(hashes))
        if len(waiting) > num_each:
            running.append(waiting.popleft())
            router.prefilled(running[-1])
        if len(running) > num_each:
            router.finished(running.popleft())
        for report in range(_REPORTS_PER_CHOICE):
            fleet.report((number * _REPORTS_PER_CHOICE + report) % num_workers)
        total.choice_s += chosen_s - begun_s
        total.request_s += time.process_time() - begun_s
        fleet.store(decision, hashes)
    total.growth_bytes += process.memory_info().rss
    if router.index.num_entries > _BLOCKS_HELD * num_workers:
        raise ConfigError(f"the index holds {router.index.num_entries} entries")
    return total


def measure_choices(file: Path, num_workers: int, num_choices: int) -> Iterator[Figure]:
    """Yield the figures of a trace's choices, without and with blocks in the index."""
    entries = read_trace(file)
    for kind, holds_blocks in (("idle_index", False), ("full_index", True)):
        total = choose_all(entries, num_workers, num_choices, holds_blocks=holds_blocks)
        name, label = f"{file.stem}_{kind}", f"{file.stem}, {kind.replace('_', ' ')}"
        choice_us, request_us = (
            (1e6 * seconds / num_choices,) for seconds in (total.choice_s, total.request_s)
        )
        notes = (f"{num_choices} among {num_workers}",)
        yield Figure(f"{name}_choice_us", f"{label}, choice", "us", choice_us, TARGET, notes=notes)
        yield Figure(f"{name}_request_us", "  whole request", "us", request_us)
        growth = (total.growth_bytes / 2**20,)
        yield Figure(f"{name}_growth_mib", "  growth", "MiB", growth, GROWTH_TARGET)


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the router's choice of a worker for the prompts of a trace."""

    traces: tuple[Path, ...] = option((), "Mooncake traces", is_positional=True)
    candidates: int = option(1000, "workers among which one is chosen", least=1)
    choices: int = option(20_000, "choices, for each kind of index", least=2)
    output: Path | None = option(None, "write everything as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    counts = options.candidates, options.choices

    def figures(_: Path) -> list[Figure]:
        return [each for file in options.traces for each in measure_choices(file, *counts)]

    return run_program(MODULE, options, HOW, figures)


if __name__ == "__main__":
    sys.exit(main())
