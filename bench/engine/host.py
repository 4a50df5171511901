"""The host's time of a decode step without its runner, for which there is a stand-in.

`python -m tandem.bench.engine.host` measures the engine alone; `run` is a section of the engine's.
"""

import itertools
import random
import sys
import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Arguments
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Figure, at_most, medians, percentile
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.report.setting import Setting
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.core.runner import Runner
from tandem.engine.schedule.sequence import Chunk, OnLayers, Sequence
from tandem.engine.step.outcome import SampledToken, ScoredPart
from tandem.runtime.wire.messages import SamplingParams, StopConditions

MODULE = "tandem.bench.engine.host"
TARGET = at_most(500.0)
HOW = {"host time": "CPU time of scheduling, launching and postprocessing one step"}
BLOCK_SIZE = 64
MAX_PROMPT_TOKENS = 4 * BLOCK_SIZE  # random lengths: full blocks are published in any step
EOS_TOKEN_ID = 1
TOKEN = SampledToken(7, None)


@dataclass(slots=True, frozen=True)
class _Step:
    """A step that takes no time."""

    drawn: list[SampledToken]
    seconds: float = 1e-3

    def tokens(self) -> list[SampledToken]:
        return self.drawn

    def prompt_scores(self) -> list[ScoredPart]:
        return []


class _Runner:
    """A stand-in that draws the same token for every sequence."""

    def __init__(self, num_blocks: int) -> None:
        pool = SimpleNamespace(num_blocks=num_blocks, block_size=BLOCK_SIZE, windows=(0,))
        self.device_kind = "gpu"
        self.kv_caches = [pool]
        self.model_config = SimpleNamespace(
            eos_token_ids=(EOS_TOKEN_ID,), max_position_embeddings=2**20, num_layers=1
        )
        self._drawn: list[SampledToken] = []

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> _Step:
        if len(self._drawn) != len(chunks):
            self._drawn = [TOKEN] * sum(chunk.samples for chunk in chunks)
        return _Step(self._drawn)


def measure(num_seqs: int, num_steps: int, *, overlap: bool) -> list[float]:
    """Return the microseconds of each of `num_steps` decode steps of `num_seqs` sequences."""
    num_blocks = num_seqs * (-(-(MAX_PROMPT_TOKENS + num_steps + 8) // BLOCK_SIZE) + 1)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * MAX_PROMPT_TOKENS,
        overlap=overlap,
    )
    engine = Engine(config, cast(Runner, _Runner(num_blocks)))
    rng = random.Random(0)
    for i in range(num_seqs):
        prompt = [rng.randrange(2, 1000) for _ in range(rng.randint(1, MAX_PROMPT_TOKENS))]
        stop = StopConditions(max_tokens=num_steps + 8)
        engine.add(Sequence(f"r{i}", prompt, len(prompt), SamplingParams(), stop))
    engine.step()  # their prompts
    engine.step()
    times_us = []
    for _ in range(num_steps):
        start = time.thread_time()
        outputs = engine.step()
        times_us.append((time.thread_time() - start) * 1e6)
        assert len(outputs) == num_seqs
    return times_us


def figures(num_seqs: int, num_steps: int, num_rounds: int) -> Iterator[Figure]:
    """Measure steps with and without overlap, in turns."""
    found: dict[str, list[list[float]]] = {"on": [], "off": []}
    for _, overlap in itertools.product(range(num_rounds), found):
        found[overlap].append(measure(num_seqs, num_steps, overlap=overlap == "on"))
    for overlap, rounds in found.items():
        label = f"engine's host time of a step, {num_seqs} running, overlap {overlap}"
        p99 = tuple(percentile(times_us, 0.99) for times_us in rounds)
        yield Figure(f"host_overlap_{overlap}", label, "us", medians(rounds), TARGET)
        yield Figure(f"host_overlap_{overlap}_p99", "  p99", "us", p99)


def run(setting: Setting) -> Iterator[Figure]:
    """Measure the same on every device, for it is the host's."""
    yield from figures(setting.size(256, 8), setting.size(500, 10), num_rounds(setting))


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the host's time of the engine's decode steps, without their runner."""

    num_seqs: int = option(256, "sequences that decode", least=1)
    num_steps: int = option(1000, "steps that are timed", least=2)
    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    output: Path | None = option(None, "write everything as JSON")


def main(arguments: Arguments[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    counts = options.num_seqs, options.num_steps, options.rounds
    return run_program(MODULE, options, HOW, lambda _: figures(*counts))


if __name__ == "__main__":
    sys.exit(main())
