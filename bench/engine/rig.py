"""Engines to measure: real ones over random weights, with a record of each of their steps."""

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tandem.bench.engine.profile import STEP_MARK
from tandem.bench.engine.setting import shape_for
from tandem.bench.report.setting import Setting, synchronize
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.core.runner import Runner, Step
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Chunk, OnLayers
from tandem.engine.schedule.sequence import Sequence as EngineSequence
from tandem.engine.step.outcome import SampledToken, ScoredPart
from tandem.engine.weights.random_weights import random_weights
from tandem.engine.weights.weights import ModelWeights
from tandem.runtime.wire.messages import SamplingParams, StopConditions

DRY_KV_BYTES = 8 << 20  # the pool of a dry run; a GPU's is sized by its memory
FILLED_BLOCKS = 256  # of the pool at once: random numbers are drawn in 32-bit sizes


@dataclass(slots=True)
class StepRecord:
    """One step by the host's clock, time.perf_counter()."""

    num_decodes: int
    num_prompt_tokens: int
    num_context_tokens: int  # of the decodes, together
    launched_at: float
    launch_cpu_s: float = 0.0  # of the thread that launches; without overlap a CPU computes there
    waited_s: float = 0.0  # of the host, for the tokens
    ended_at: float = 0.0  # the tokens were there
    device_s: float = 0.0


class RecordingRunner:
    """A runner that keeps a record of each collected step, in their order."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.model_config = runner.model_config
        self.device_kind = runner.device_kind
        self.kv_caches = runner.kv_caches
        self.records: list[StepRecord] = []

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> Step:
        decodes = [chunk for chunk in chunks if chunk.end - chunk.start == 1]
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        launched_at, begun_s = time.perf_counter(), time.thread_time()
        with torch.profiler.record_function(STEP_MARK):
            step = self._runner.launch(chunks, on_layers, boundaries)
        record = StepRecord(
            num_decodes=len(decodes),
            num_prompt_tokens=num_tokens - len(decodes),
            num_context_tokens=sum(chunk.end for chunk in decodes),
            launched_at=launched_at,
            launch_cpu_s=time.thread_time() - begun_s,
        )
        return _RecordedStep(step, record, self.records)


class _RecordedStep:
    def __init__(self, step: Step, record: StepRecord, records: list[StepRecord]) -> None:
        self._step, self._record, self._records = step, record, records

    @property
    def seconds(self) -> float:
        return self._step.seconds

    def tokens(self) -> list[SampledToken]:
        record = self._record
        asked_at = time.perf_counter()
        tokens = self._step.tokens()
        record.ended_at = time.perf_counter()
        record.waited_s = record.ended_at - asked_at
        record.device_s = self._step.seconds
        self._records.append(record)
        return tokens

    def prompt_scores(self) -> list[ScoredPart]:
        return self._step.prompt_scores()


class Rig:
    """An engine over a model runner, with random K/V in the pool."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.runner = RecordingRunner(runner)
        self.engine = Engine(config, self.runner)
        self.model = runner.model_config
        self._num_named = 0

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        cache = self.runner.kv_caches[0]
        return cache.num_blocks * cache.block_size

    def place(self, num_seqs: int, num_context_tokens: int) -> None:
        """Add running sequences whose context lies in the pool as if it had been handed over."""
        for _ in range(num_seqs):
            num_left = self.engine.max_model_len - num_context_tokens
            seq = self._sequence(num_context_tokens, num_left)
            if self.engine.reserve(seq) is None:
                raise MemoryError(
                    f"the KV pool of {self.num_slots} tokens has no room for {num_seqs} sequences "
                    f"of {num_context_tokens}"
                )
            self.engine.admit(seq.request_id, SampledToken(seq.token_ids[0], None))

    def decode(self, num_steps: int) -> list[StepRecord]:
        """Return the records of the next steps, without those of steps that hold a prompt."""
        records = self.runner.records
        records.clear()
        while len(records) < num_steps:
            if not self.step():
                raise RuntimeError("the engine ran out of work")
        return [record for record in records[:num_steps] if not record.num_prompt_tokens]

    def prompt(self, num_tokens: int) -> EngineSequence:
        """Return a new prompt, to be answered by one token."""
        return self._sequence(num_tokens, max_tokens=1)

    def prefill(self, prompt: EngineSequence) -> list[StepRecord]:
        """Return the records of the steps from now on to the prompt's token."""
        records = self.runner.records
        records.clear()
        self.engine.add(prompt)
        while self.engine.scheduler.find(prompt.request_id) is not None:
            self.step()
        last = max(i for i, record in enumerate(records) if record.num_prompt_tokens)
        return records[: last + 1]

    def step(self) -> bool:
        """Run one step of the engine; False when there is nothing to do. Raise a step's error."""
        if not self.engine.has_work:
            return False
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
        return True

    def clear(self) -> None:
        """End every sequence and the step in flight."""
        scheduler = self.engine.scheduler
        for request_id in [*scheduler.running, *scheduler.waiting, *scheduler.remote]:
            self.engine.abort(request_id)
        while self.step():
            pass
        self.engine.check_invariants()

    def _sequence(self, num_tokens: int, max_tokens: int) -> EngineSequence:
        self._num_named += 1
        generator = torch.Generator().manual_seed(self._num_named)
        tokens = torch.randint(self.model.vocab_size, (num_tokens,), generator=generator)
        return EngineSequence(
            request_id=f"bench-{self._num_named}",
            token_ids=tokens.tolist(),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(seed=self._num_named),
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )


class Workshop:
    """Weights on the device, random ones by default, and rigs over them."""

    def __init__(
        self,
        setting: Setting,
        model: ModelConfig | None = None,
        weights: ModelWeights | None = None,
    ) -> None:
        self.setting = setting
        self.model = model or shape_for(setting)
        dtype: torch.dtype = getattr(torch, self.model.dtype)
        self.weights = weights or random_weights(self.model, dtype, setting.device)

    def config(self, **values: Any) -> EngineConfig:
        """Return an engine's configuration on this device, without a prefix cache."""
        device = self.setting.device
        name = "cpu" if self.setting.is_dry else f"cuda:{device.index or 0}"
        return EngineConfig(
            device=name, enable_prefix_cache=False, kv_memory_bytes=DRY_KV_BYTES, **values
        )

    def runner(self, config: EngineConfig) -> ModelRunner:
        """Return a runner of the model under `config`, its pool full of random K/V."""
        runner = ModelRunner(config, model_config=self.model, weights=self.weights)
        pool = runner.kv_cache.tensor
        for start in range(0, len(pool), FILLED_BLOCKS):
            pool[start : start + FILLED_BLOCKS].normal_()
        synchronize(self.setting)  # the runner's stream is its own
        return runner

    def rig(self, **values: Any) -> Rig:
        config = self.config(**values)
        return Rig(config, self.runner(config))


@contextlib.contextmanager
def engine_log() -> Iterator[list[str]]:
    """Yield the lines that the engine logs in the body: time and memory of graphs, pool size."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("tandem.engine")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def intervals_s(records: Sequence[StepRecord]) -> Iterator[float]:
    """Yield the seconds from the tokens of each step to those of the next."""
    return (later.ended_at - earlier.ended_at for earlier, later in pairwise(records))


def host_s(records: Sequence[StepRecord]) -> Iterator[float]:
    """Yield the host's own part of the intervals between steps' tokens: all but its waiting."""
    return (
        later.ended_at - earlier.ended_at - later.waited_s for earlier, later in pairwise(records)
    )
