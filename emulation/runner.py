"""The engine's Runner on an emulated device: real KV pool, real tokens, modelled time."""

import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tandem.emulation.pool import NUM_LAYERS, DigestPool, HostBlocks, Work
from tandem.emulation.profile import load_profile
from tandem.engine.config import DeviceKind, EngineConfig, batch_sizes
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.memory.kv_blocks import choose_block_size, choose_max_model_len
from tandem.engine.schedule.sequence import Chunk, OnLayers
from tandem.engine.schedule.step_cost import work_of
from tandem.engine.step.outcome import SampledToken, ScoredPart
from tandem.runtime.wire.messages import TokenLogprobs


class EmulatedRunner:
    """Computes nothing, takes the time of `profile` for it, and proves what it read.

    To the engine it is a GPU, or what the profile says. The profile `config.emulate` gives its
    speed and its pool; the model's folder gives vocabulary and end of text, its weights are not
    read. Raises ConfigError, ModelError or CapacityError when it cannot be built.
    """

    followers = None  # the profile of a width stands for all its ranks

    def __init__(self, config: EngineConfig) -> None:
        assert config.emulate is not None
        self.profile = profile = load_profile(config.emulate)
        self.device_kind: DeviceKind = profile.device_kind
        block_size = choose_block_size(config, self.device_kind)
        num_blocks = config.num_blocks or profile.kv_tokens // block_size
        self.config = config.model_copy(update={"block_size": block_size, "num_blocks": num_blocks})
        stored = choose_model_config(config.model, config.model_impl)
        # A slot is a digest of 8 bytes, twice: K and V of four layers, one head and one number.
        self.model_config = replace(
            stored,
            num_layers=NUM_LAYERS,
            num_kv_heads=1,
            head_dim=1,
            dtype="float16",
            layer_kinds=(),
            max_position_embeddings=profile.max_position_embeddings,
        )
        choose_max_model_len(config, self.model_config, num_blocks, block_size)
        self.kv_cache = HostBlocks(self.model_config, num_blocks, block_size)
        self.kv_caches = (self.kv_cache,)  # of the only rank
        has_graphs = config.cuda_graphs and self.device_kind == "gpu"
        self._graph_sizes = batch_sizes(config.max_num_seqs) if has_graphs else []
        ends = set(self.model_config.eos_token_ids)
        token_ids = [each for each in range(self.model_config.vocab_size) if each not in ends]
        num_rows = config.max_num_seqs + 1
        self._pool = DigestPool(self.kv_cache.tensor, block_size, num_rows, np.array(token_ids))
        self._launched: deque[EmulatedStep] = deque()  # oldest first
        self._computing = threading.Lock()  # of the engine's thread, and of one that asks an event
        self.clock = DeviceClock()

    def check_device(self) -> None:
        """Return: no emulated device is ever lost."""

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> "EmulatedStep":
        """Begin a step, which ends in the modelled time after those before it."""
        seconds = self._seconds(chunks) if chunks else 0.0
        works = [Work.of(chunk, self.kv_cache.block_size) for chunk in chunks]
        wants = [chunk.seq.sampling.logprobs for chunk in chunks if chunk.samples]
        step = EmulatedStep(self, works, wants, seconds)
        with self._computing:
            self._launched.append(step)
        if on_layers is not None:
            for num_layers in boundaries:
                event: Any = LayersEvent(self, step, num_layers)
                on_layers(num_layers, event)
        return step

    def _seconds(self, chunks: list[Chunk]) -> float:
        work = work_of(chunks)
        computed = work.num_decodes
        if not work.num_prompt_tokens:
            computed = next((size for size in self._graph_sizes if size >= computed), computed)
        num_rows = sum(chunk.samples for chunk in chunks)
        return self.profile.step_seconds(work, num_rows, computed)

    def compute(self, step: "EmulatedStep", num_layers: int = NUM_LAYERS) -> None:
        """Compute a step, after all earlier ones; only its slots where not all layers are done."""
        with self._computing:
            while step.drawn is None:
                first = self._launched[0]
                if first is step and num_layers < NUM_LAYERS:
                    return self._pool.write(step.works, num_layers)
                first.drawn = self._pool.compute(self._launched.popleft().works)


class DeviceClock:
    """The time at which an emulated device is free, and how late its steps were collected."""

    def __init__(self) -> None:
        self._free_at = 0.0  # perf_counter seconds
        self.num_steps = 0
        self.busy_s = 0.0
        self.late_s = 0.0  # of all steps, from their end to their tokens
        self.worst_late_s = 0.0

    @property
    def late_share(self) -> float:
        """The part by which steps took longer than modelled: figures of a run are off by it."""
        return self.late_s / self.busy_s if self.busy_s else 0.0

    def summary(self) -> str:
        """Return a line for people."""
        mean_ms, worst_ms = 1e3 * self.late_s / max(1, self.num_steps), 1e3 * self.worst_late_s
        late = f"{mean_ms:.2g} ms late on average ({self.late_share:.1%}), {worst_ms:.3g} at worst"
        return f"{self.num_steps} in {self.busy_s:.1f} s, {late}"

    def begin(self, seconds: float) -> float:
        """Begin work of `seconds` after all earlier work; return its end."""
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        return self._free_at

    def wait(self, ends_at: float, seconds: float) -> None:
        """Sleep until `ends_at`, the end of work of `seconds`, and count the delay."""
        if (left_s := ends_at - time.perf_counter()) > 0:
            time.sleep(left_s)
        late_s = time.perf_counter() - ends_at
        self.num_steps += 1
        self.busy_s += seconds
        self.late_s += late_s
        self.worst_late_s = max(self.worst_late_s, late_s)


class EmulatedStep:
    """The engine's Step. `seconds` are the modelled ones, however late the host was.

    K/V is written when the step ends and not at its launch: a reader that does not wait for the end
    of the step reads old digests, and draws wrong tokens.
    """

    def __init__(
        self, runner: EmulatedRunner, works: list[Work], wants: list[int | None], seconds: float
    ) -> None:
        self.works = works
        self.drawn: list[int] | None = None  # once computed
        self.seconds = seconds
        self._runner = runner
        self._wants = wants  # of each chunk that samples: likeliest tokens, or None
        self.ends_at = runner.clock.begin(seconds)  # perf_counter seconds

    def tokens(self) -> list[SampledToken]:
        """Return one token per chunk that samples; blocks until the step's modelled end."""
        if self._runner.device_kind == "cpu":  # it is through with a step before the next begins
            self._runner.compute(self)
        self._runner.clock.wait(self.ends_at, self.seconds)
        self._runner.compute(self)
        assert self.drawn is not None
        return [
            SampledToken(each, None if k is None else TokenLogprobs(0.0, [(each, 0.0)][:k]))
            for each, k in zip(self.drawn, self._wants, strict=True)
        ]

    def prompt_scores(self) -> list[ScoredPart]:
        """Return none: the runner scores no prompts."""
        return []


class LayersEvent:
    """A stand-in for a CUDA event: the layers of a step are in the pool once it is due."""

    def __init__(self, runner: EmulatedRunner, step: EmulatedStep, num_layers: int) -> None:
        self.due_at = step.ends_at - step.seconds * (1 - num_layers / NUM_LAYERS)
        self._compute = partial(runner.compute, step, num_layers)

    def query(self) -> bool:
        """Return True once the event has happened."""
        if time.perf_counter() < self.due_at:
            return False
        self._compute()
        return True
