"""What the engine itself costs the host per step: everything but the runner, which is a stand-in.

`python -m tandem.bench.engine.host` prints microseconds per decode step; it writes nothing.
"""

import random
import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, cast

import typer

from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine, Runner
from tandem.engine.schedule.sequence import Chunk, OnLayers, Sequence
from tandem.engine.step.sampler import SampledToken
from tandem.runtime.messages import SamplingParams, StopConditions

BLOCK_SIZE = 64
MAX_PROMPT_TOKENS = 4 * BLOCK_SIZE  # random lengths: full blocks are published in any step
EOS_TOKEN_ID = 1
TOKEN = SampledToken(7, None)


@dataclass(slots=True, frozen=True)
class HostTime:
    """Of one decode step, without the runner's share."""

    overlap: bool
    num_seqs: int
    median_us: float
    p99_us: float


@dataclass(slots=True, frozen=True)
class _Step:
    """Computed by nobody in no time."""

    drawn: list[SampledToken]
    seconds: float = 1e-3

    def tokens(self) -> list[SampledToken]:
        return self.drawn


class _Runner:
    """Gives every sequence the same token."""

    def __init__(self, num_blocks: int) -> None:
        pool = SimpleNamespace(num_blocks=num_blocks, block_size=BLOCK_SIZE, memory="VRAM")
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


def measure(num_seqs: int, num_steps: int, *, overlap: bool) -> HostTime:
    """Decode `num_steps` steps of `num_seqs` sequences, and time each one."""
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
    p99 = statistics.quantiles(times_us, n=100)[98]
    return HostTime(overlap, num_seqs, statistics.median(times_us), p99)


def main(
    num_seqs: Annotated[int, typer.Option(min=1, help="sequences that decode")] = 256,
    num_steps: Annotated[int, typer.Option(min=2, help="steps that are timed")] = 1000,
) -> None:
    """Host time per decode step of the engine, without its runner."""
    for overlap in (False, True):
        found = measure(num_seqs, num_steps, overlap=overlap)
        print(
            f"overlap {'on ' if overlap else 'off'}  {found.num_seqs} running  "
            f"median {found.median_us:.0f} us  p99 {found.p99_us:.0f} us"
        )


if __name__ == "__main__":
    typer.run(main)
