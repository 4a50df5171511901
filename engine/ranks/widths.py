"""The numbers of ranks that can compute a model, and the order of sums that they have in common."""

import torch
import torch.distributed

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import cut_unit
from tandem.engine.architecture.spec import Size
from tandem.engine.config import EngineConfig
from tandem.runtime.errors import ConfigError

WIDTHS = (1, 2, 4, 8)  # the last as in kernels.cpu.segments, which needs a C compiler
LEAST_DOT = 16  # inputs of a product's step on GPUs, which share a scale
_WHOLE_NORMS = ("wide_q_norm", "wide_k_norm")


def num_segments(config: EngineConfig, model: ModelConfig) -> int:
    """Return the segments in which the products of attention and feed-forward outputs add up.

    `config` and `model` are resolved ones. 1 where a model is computed by one process alone.
    """
    if config.kernels == "triton" and config.tp == 1 and not config.tp_invariant:
        return 1
    if _obstacle(config, model) is not None:
        return 1
    return _widths(model)[-1] if config.tp_invariant else config.tp


def check_width(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError, with the reason, for a `tp` that can't compute the model.

    `config` and `model` are resolved ones.
    """
    is_asked = config.kernels == "triton" and config.tp_invariant
    if config.tp == 1 and not is_asked:
        return
    reason = _obstacle(config, model)
    if reason is None and config.tp not in (widths := _widths(model)):
        cuts = [f"a width of {size} in units of {unit}" for size, unit in _cut_sizes(model)]
        reason = (
            f"a model of {model.num_heads} heads, {model.num_kv_heads} KV heads and "
            f"{' and '.join(cuts)} is served by {', '.join(map(str, widths))} processes"
        )
    if reason is not None:
        raise ConfigError(f"tp {config.tp}: {reason}", param="tp")


def _widths(model: ModelConfig) -> list[int]:
    """Return the numbers of ranks that can share the model's heads and its layers' width."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    units = min(size // unit for size, unit in _cut_sizes(model))
    return [
        width
        for width in WIDTHS
        if width == 1
        or (heads % width == 0 and units >= width and 0 in (kv_heads % width, width % kv_heads))
    ]


def _cut_sizes(model: ModelConfig) -> list[tuple[int, int]]:
    """Return the widths of feed-forward layers and experts, and in which units they are cut."""
    names: set[Size] = set()
    for layer in range(model.num_layers):
        for spec in model.layer_tensors(layer):
            if spec.slot in ("down", "experts_down"):
                names.add(spec.shape[-2 if spec.is_transposed else -1])
    return [(getattr(model, name), cut_unit(model, name)) for name in sorted(names)]


def _obstacle(config: EngineConfig, model: ModelConfig) -> str | None:
    """Return the reason why one process alone can compute the model; None: several can."""
    if config.emulate is not None:
        return "an emulated device is one; choose the profile of several"
    if config.kernels == "triton":
        if (reason := _obstacle_in_triton(config, model)) is not None:
            return reason
    elif config.device != "cpu":
        return f'GPUs share a model with the kernels in Triton, not "{config.kernels}"'
    elif config.kernels != "c":
        return f'it needs the kernels in C, not "{config.kernels}"; install a C compiler'
    if model.architecture.code:
        return f"the model is computed by {model.architecture.code}, in one process"
    slots = {spec.slot for spec in model.layer_tensors(0)}
    if slots.intersection(_WHOLE_NORMS):
        return "the model norms queries over all heads at once, which one process must have"
    for width, _ in _cut_sizes(model):
        if width % 2:
            return f"a layer's width of {width} is not cut"
    if model.quantization is not None and model.head_dim % 8:
        return f"quantized matrices for heads of {model.head_dim} numbers are not cut"
    if config.kernels == "triton":
        return None
    # Not at the top: it compiles the kernels.
    from tandem.kernels.cpu.linear import is_for_c

    if not is_for_c(torch.empty(2, 2, dtype=getattr(torch, model.dtype))):
        return (
            f"{model.dtype} is not multiplied by the kernels in C on this processor; set "
            "engine.dtype to float32"
        )
    return None


def _obstacle_in_triton(config: EngineConfig, model: ModelConfig) -> str | None:
    """Return the reason why the kernels of GPUs can't share a model."""
    if config.device != "cpu" and not torch.distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL, by which GPUs exchange; install one for CUDA"
    if config.tp_invariant and not config.deterministic:
        return (
            "on GPUs, engine.tp_invariant needs engine.deterministic: without, sums run in an "
            "order that other work of a step changes"
        )
    if model.quantization is not None and config.tp_invariant:
        return "of quantized weights sums run in the order of tp: leave engine.tp_invariant unset"
    if model.quantization is not None and model.quantization.rounds_inputs:
        return "FP8 by FP8 is multiplied by one GPU: leave engine.float8_products off"
    if model.quantization is not None and model.head_dim % LEAST_DOT:
        return f"quantized matrices for heads of {model.head_dim} numbers are not cut"
    if model.num_experts and config.tp_invariant:
        return "of experts sums run in the order of tp: leave engine.tp_invariant unset"
    return None
