"""The configuration of an engine with "auto" and None resolved for this machine and model."""

from dataclasses import replace

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import STEP_TOKENS, EngineConfig
from tandem.engine.decoder.kernel_set import choose_kernels, has_float8_products
from tandem.engine.memory.kv_blocks import choose_block_size
from tandem.engine.memory.kv_cache import kind_of
from tandem.engine.ranks.widths import check_width, num_segments
from tandem.runtime.errors import ConfigError


def resolve(config: EngineConfig, stored: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Resolve all but the size of the KV pool; the model's dtype becomes the one that runs.

    Raises ConfigError for a device or kernels that this machine does not have, and for a `tp` that
    can't compute the model.
    """
    device = _device(config.device)
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else stored.dtype
    resolved = config.with_step_tokens(STEP_TOKENS[kind_of(device)]).model_copy(
        update={
            "dtype": dtype,
            "device": str(device),
            "block_size": choose_block_size(config, kind_of(device)),
            "threads": config.num_threads(),
            "kernels": choose_kernels(config.kernels, device),
        }
    )
    longest = config.max_model_len or stored.max_position_embeddings
    form = stored.quantization
    if form is not None and form.rounds_inputs:
        form = replace(
            form, rounds_inputs=config.float8_products and has_float8_products(resolved.kernels)
        )
    model = replace(stored, dtype=dtype, quantization=form).for_length(longest)
    check_width(resolved, model)
    if not resolved.tp_invariant and num_segments(resolved, model) == resolved.tp:
        model = replace(model, sums_of_width=resolved.tp)
    return resolved, model


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: this machine has {torch.cuda.device_count()} GPUs", param="device"
        )
    return device
