"""From a step's chunks to its tokens: weights, KV cache, forward pass, sampling."""

import ctypes
import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch

from tandem.engine.batch import build_batch
from tandem.engine.config import EngineConfig
from tandem.engine.kernel_set import choose_kernels, load_kernels
from tandem.engine.kv_cache import (
    KvCache,
    choose_block_size,
    choose_max_model_len,
    choose_num_blocks,
)
from tandem.engine.model import Model
from tandem.engine.model_config import load_model_config
from tandem.engine.rope import rope_table
from tandem.engine.sampler import SampledToken, Sampler, SampleRow
from tandem.engine.sequence import Chunk, OnLayers
from tandem.engine.weights import load_weights
from tandem.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

# mallopt's parameters in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


class ModelRunner:
    """One model on one device. Used by one thread at a time.

    `config` is the given one with "auto" and None resolved; `model_config.dtype` is the dtype the
    model runs in. Raises ModelError, ConfigError or CapacityError when it cannot be built.
    """

    def __init__(self, config: EngineConfig) -> None:
        device = _device(config.device)
        torch.set_num_threads(config.num_threads())
        if device.type == "cpu":
            _keep_freed_memory()
        stored = load_model_config(config.model)
        self.model_config = replace(stored, dtype=_dtype(config.dtype, stored.dtype, device))
        dtype: torch.dtype = getattr(torch, self.model_config.dtype)
        weights = load_weights(config.model, self.model_config, dtype, device)
        block_size = choose_block_size(config, device)
        num_blocks = choose_num_blocks(config, self.model_config, block_size, device)
        max_model_len = choose_max_model_len(config, self.model_config, num_blocks, block_size)
        kernels = choose_kernels(config.kernels, device)
        self.config = config.model_copy(
            update={
                "dtype": self.model_config.dtype,
                "device": str(device),
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_model_len": max_model_len,
                "threads": config.num_threads(),
                "kernels": kernels,
            }
        )
        self.kv_cache = KvCache(self.model_config, num_blocks, block_size, device)
        table = rope_table(
            self.model_config.rope, self.model_config.head_dim, max_model_len, dtype, device
        )
        self._device = device
        loaded = load_kernels(kernels)
        self._model = Model(self.model_config, weights, table, loaded)
        self._sampler = Sampler(
            self.model_config.vocab_size, self.model_config.eos_token_ids, loaded.sample
        )
        # The torch twin multiplies masked slots by zero, so none of them may hold a NaN.
        self._clears_started_blocks = kernels == "torch"
        logger.info(
            "%s on %s in %s, %d KV blocks of %d tokens",
            config.model,
            device,
            self.model_config.dtype,
            num_blocks,
            block_size,
        )

    @torch.inference_mode()
    def run(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> list[SampledToken]:
        """Compute every chunk's tokens and store their K/V; one token per chunk that samples.

        Tokens come in the order of `chunks`. Blocks for positions [0, end) must be in the
        sequence's block table. Blocks until the tokens are on the host and all K/V is in the pool,
        where a transfer may read it next; `on_layers` hears before of `boundaries`, in order.
        """
        if not chunks:
            return []
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread, and Triton launches on the current
        batch = build_batch(chunks, self.kv_cache.block_size, self._device)
        if self._clears_started_blocks and batch.started_blocks.shape[0]:
            self.kv_cache.tensor.index_fill_(0, batch.started_blocks, 0)
        tell = None
        if on_layers is not None:
            tell = partial(_tell_layers, on_layers, self._device)
        logits = self._model.forward(batch, self.kv_cache.tensor, tell, boundaries)
        rows = [SampleRow(chunk.seq, chunk.end) for chunk in chunks if chunk.samples]
        tokens = self._sampler.sample(logits, rows)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return tokens


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
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**30)


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
