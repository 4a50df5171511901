"""From a step's chunks to its tokens: weights, KV cache, forward pass, sampling."""

import ctypes
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernel_set import Kernels, choose_kernels, load_kernels
from tandem.engine.memory.budget import CudaMemory, kv_budget_bytes
from tandem.engine.memory.kv_cache import (
    KvCache,
    choose_block_size,
    choose_max_model_len,
    memory_of,
    num_blocks_within,
)
from tandem.engine.memory.profile import StepProfile
from tandem.engine.models.config import ModelConfig, load_model_config
from tandem.engine.models.decoder import Model
from tandem.engine.models.rope import rope_table
from tandem.engine.models.weights import ModelWeights, load_weights
from tandem.engine.schedule.sequence import Chunk, OnLayers
from tandem.engine.step.batch import (
    PackedStep,
    build_batch,
    build_decode_batch,
    pack_step,
    started_blocks,
)
from tandem.engine.step.decode_graphs import CudaRecorder, DecodeGraphs, Recorder, batch_sizes
from tandem.engine.step.launched import LaunchedStep, start_timing
from tandem.engine.step.rows import Seats
from tandem.engine.step.sampler import HostTokens, Sampler, SamplingPlan
from tandem.kernels.sampling.rows import SampledRows
from tandem.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

# mallopt's parameters in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


class ModelRunner:
    """One model on one device. Built by any thread, then used by one thread at a time.

    `config` is the given one with "auto" and None resolved; `model_config.dtype` is the dtype the
    model runs in. On a GPU all steps run on one stream of their own. `recorder` is what decode
    steps are recorded with; None: CUDA graphs where there is a GPU, and the configuration says so.
    `model_config` and `weights`, on the device, stand for the files of config.model.
    Raises ModelError, ConfigError or CapacityError when it cannot be built.
    """

    def __init__(
        self,
        config: EngineConfig,
        recorder: Recorder | None = None,
        *,
        model_config: ModelConfig | None = None,
        weights: ModelWeights | None = None,
    ) -> None:
        self._device = device = _device(config.device)
        torch.set_num_threads(config.num_threads())
        if device.type == "cpu":
            _keep_freed_memory()
        stored = model_config or load_model_config(config.model)
        self.model_config = replace(stored, dtype=_dtype(config.dtype, stored.dtype, device))
        kernels = choose_kernels(config.kernels, device)
        block_size = choose_block_size(config, device)
        self.config = config.model_copy(
            update={
                "dtype": self.model_config.dtype,
                "device": str(device),
                "block_size": block_size,
                "threads": config.num_threads(),
                "kernels": kernels,
            }
        )
        # The torch twin multiplies masked slots by zero, so none of them may hold a NaN.
        self._clears_started_blocks = kernels == "torch"
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with self._on_stream():
            self._build(block_size, load_kernels(kernels), weights)
            self._graphs = self._record(recorder)
        if self._stream is not None:
            self._stream.synchronize()
        logger.info(
            "%s on %s in %s, %d KV blocks of %d tokens",
            config.model,
            device,
            self.model_config.dtype,
            self.kv_cache.num_blocks,
            block_size,
        )

    def _build(self, block_size: int, kernels: Kernels, weights: ModelWeights | None) -> None:
        """Weights, model, KV pool, and what there is by seat."""
        config, model_config, device = self.config, self.model_config, self._device
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        weights = weights or load_weights(config.model, model_config, dtype, device)
        num_blocks = config.num_blocks
        if num_blocks is None and device.type == "cpu":
            num_blocks = num_blocks_within(
                config.kv_memory_bytes, model_config, block_size, memory_of(device)
            )
        if num_blocks is None:
            longest = config.max_model_len or model_config.max_position_embeddings
        else:
            longest = choose_max_model_len(config, model_config, num_blocks, block_size)
        table = rope_table(model_config.rope, model_config.head_dim, longest, dtype, device)
        self._model = Model(model_config, weights, table, kernels)
        if num_blocks is None:
            memory = CudaMemory(device)
            profile = StepProfile(
                config, model_config, self._model, kernels.sample, longest, device
            )
            reserve = profile.reserve(memory)
            del profile
            budget = kv_budget_bytes(config, memory, reserve)
            num_blocks = num_blocks_within(budget, model_config, block_size, memory_of(device))
            longest = choose_max_model_len(config, model_config, num_blocks, block_size)
        self.config = config.model_copy(update={"num_blocks": num_blocks, "max_model_len": longest})
        self.kv_cache = KvCache(model_config, num_blocks, block_size, device)
        self._seats = Seats(
            config.max_num_seqs,
            -(-longest // block_size),
            device,
            pads_tables=config.kernels == "torch",
        )
        self._sampler = Sampler(
            model_config.vocab_size, model_config.eos_token_ids, kernels.sample, self._seats
        )

    @torch.inference_mode()
    def _record(self, recorder: Recorder | None) -> DecodeGraphs | None:
        config = self.config
        if recorder is None:
            # The twins look at lengths on the host, which no graph can.
            if self._stream is None or not config.cuda_graphs or config.kernels == "torch":
                return None
            recorder = CudaRecorder(self._stream)
        sizes = batch_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
        return DecodeGraphs(self, self._seats, sizes, recorder)

    @torch.inference_mode()
    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> LaunchedStep:
        """Begin to compute every chunk's tokens and to store their K/V; sample where asked.

        Blocks for positions [0, end) must be in the sequence's block table, and the sequence must
        have a seat; sequences may change as soon as this returns. `on_layers` hears of
        `boundaries`, in order, before it returns. On a CPU all is done by then. When it raises,
        nothing of the step is under way.
        """
        with self._on_stream():
            try:
                return self._launch(chunks, on_layers, boundaries)
            except BaseException:
                if self._stream is not None:
                    self._stream.synchronize()
                raise

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """[num_tokens, vocab_size] of a padded decode step, as build_decode_batch takes it."""
        batch = build_decode_batch(inputs, self._seats, self.kv_cache.block_size)
        return self._model.forward(batch, self.kv_cache.tensor)

    def sample(self, logits: torch.Tensor, inputs: torch.Tensor, plan: SamplingPlan) -> SampledRows:
        """The next token of every row of a decode step, kept for its seat."""
        return self._sampler.sample(logits, inputs[0], inputs[1] + 1, plan)

    def _launch(
        self, chunks: list[Chunk], on_layers: OnLayers | None, boundaries: Collection[int]
    ) -> LaunchedStep:
        if not chunks:
            return LaunchedStep(start_timing(self._device), None)
        step = pack_step(chunks)
        changes = self._seats.take_changes([chunk.seq for chunk in chunks])
        plan = self._sampler.plan(step.rows)
        timing = start_timing(self._device)
        if changes is not None:
            self._seats.apply(changes)
        if self._clears_started_blocks:
            self._clear(started_blocks(chunks, self.kv_cache.block_size))
        if self._graphs is not None and step.is_decode and on_layers is None:
            sampled = self._graphs.run(step, plan)
        else:
            tell = None
            if on_layers is not None:
                tell = partial(_tell_layers, on_layers, self._device)
            sampled = self._compute(step, plan, tell, boundaries)
        on_host = HostTokens(step.rows, sampled, plan) if step.rows else None
        return LaunchedStep(timing, on_host)

    def _compute(
        self,
        step: PackedStep,
        plan: SamplingPlan,
        tell: Callable[[int], None] | None,
        boundaries: Collection[int],
    ) -> SampledRows:
        batch = build_batch(step, self._seats, self.kv_cache.block_size)
        logits = self._model.forward(batch, self.kv_cache.tensor, tell, boundaries)
        return self._sampler.sample(logits, batch.sampled_seats, batch.sampled_positions, plan)

    def _clear(self, block_ids: list[int]) -> None:
        if block_ids:
            index = torch.tensor(block_ids, device=self._device)
            self.kv_cache.tensor.index_fill_(0, index, 0)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What is launched within goes to this runner's device, in one order."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)  # per thread, and Triton launches on the current
        with torch.cuda.stream(self._stream):
            yield


def _tell_layers(on_layers: OnLayers, device: torch.device, num_layers: int) -> None:
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    on_layers(num_layers, event)


def _keep_freed_memory() -> None:
    """Make this process's malloc reuse large freed blocks rather than return them.

    A step allocates and frees the same megabytes again and again. Mapping them anew costs a page
    fault per 4 KiB: a sampling step of 64 rows of 4,096 took 2.5 ms that way and 0.5 ms without.
    One arena, because the others, which threads get, give back what is above 64 MiB whatever the
    thresholds say: 512 prompt tokens took 0.5 s on the engine thread and 0.37 s without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_ARENA_MAX, 1)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: this machine has {torch.cuda.device_count()} GPUs", param="device"
        )
    return device


def _dtype(asked: str, stored: str, device: torch.device) -> str:
    if asked != "auto":
        return asked
    return "float32" if device.type == "cpu" else stored
