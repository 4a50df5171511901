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
    device = device_of(config.device)
    is_cpu = device.type == "cpu"
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else stored.dtype
    kernels, chosen = choose_kernels(config.kernels, device), config.tp_invariant
    resolved = config.with_step_tokens(STEP_TOKENS[kind_of(device)]).model_copy(
        update={
            "dtype": dtype,
            "device": str(device),
            "block_size": choose_block_size(config, kind_of(device)),
            "threads": config.num_threads(),
            "kernels": kernels,
            "tp_invariant": kernels != "triton" if chosen is None else chosen,
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
    has_own_sums = not resolved.tp_invariant and (kernels != "triton" or resolved.tp > 1)
    if has_own_sums and num_segments(resolved, model) == resolved.tp:
        model = replace(model, sums_of_width=resolved.tp)
    return resolved, model


def rank_devices(name: str, resolved: EngineConfig) -> list[str]:
    """Return the device of each rank, of a configuration that names it so.

    Raises ConfigError where there are not as many.
    """
    if resolved.device == "cpu":
        return ["cpu"] * resolved.tp
    named = [int(index) for index in name.removeprefix("cuda:").split(",") if index.isdecimal()]
    indexes = named
    if len(named) < 2:
        first = int(resolved.device.removeprefix("cuda:"))
        indexes = list(range(first, first + resolved.tp))
    if len(indexes) != resolved.tp or len(set(indexes)) != resolved.tp:
        raise ConfigError(
            f"device {name}: a model of {resolved.tp} ranks needs as many GPUs, each named once",
            param="device",
        )
    num_gpus = torch.cuda.device_count()
    if max(indexes) >= num_gpus:
        asked = ", ".join(map(str, indexes))
        raise ConfigError(
            f"tp {resolved.tp} takes GPUs {asked}, and this process has {num_gpus}: name others "
            "with --gpu, as in --gpu 0,1, or take a smaller --tp; "
            "CUDA_VISIBLE_DEVICES may hide some",
            param="tp",
        )
    return [f"cuda:{index}" for index in indexes]


def device_of(name: str) -> torch.device:
    """Return the device of engine.device, of several the first. Raises ConfigError without it."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name.partition(",")[0])
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: this machine has {torch.cuda.device_count()} GPUs", param="device"
        )
    return device
