"""The numbers of ranks that can compute a model, and the order of sums that they have in common."""

from math import gcd

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import EngineConfig
from tandem.runtime.errors import ConfigError

MAX_SEGMENTS = 8  # as in kernels.cpu.segments, which only a machine with a C compiler can load
_WHOLE_NORMS = ("wide_q_norm", "wide_k_norm")


def num_segments(config: EngineConfig, model: ModelConfig) -> int:
    """Return the segments in which the products of attention and feed-forward outputs add up.

    `config` and `model` are resolved ones. 1 where a model is computed by one process alone.
    """
    if _obstacle(config, model) is not None:
        return 1
    if not config.tp_invariant:
        return config.tp
    return gcd(MAX_SEGMENTS, model.num_kv_heads)


def check_width(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError, with the reason, for a `tp` that can't compute the model.

    `config` and `model` are resolved ones.
    """
    if config.tp == 1:
        return
    reason = _obstacle(config, model)
    if reason is None:
        reason = _misfit(config.tp, model.num_kv_heads, num_segments(config, model))
    if reason is not None:
        raise ConfigError(f"tp {config.tp}: {reason}", param="tp")


def _obstacle(config: EngineConfig, model: ModelConfig) -> str | None:
    """Return the reason why one process alone can compute the model; None: several can."""
    if config.emulate is not None:
        return "an emulated device is one; choose the profile of several"
    if torch.device(config.device).type != "cpu":
        return f"engine.tp above 1 is served on CPUs only, not on {config.device}"
    if config.kernels != "c":
        return f'it needs the kernels in C, not "{config.kernels}"; install a C compiler'
    if model.architecture.code:
        return f"the model is computed by {model.architecture.code}, in one process"
    if model.mixture is not None:
        return "a mixture of experts is served by one process"
    if model.quantization is not None:
        return f"{model.quantization.name} weights are served by one process"
    slots = {spec.slot for spec in model.layer_tensors(0)}
    if slots.intersection(_WHOLE_NORMS):
        return "the model norms queries over all heads at once, which one process must have"
    if model.intermediate_size % 2 or model.intermediate_size < 2 * MAX_SEGMENTS:
        return f"an intermediate_size of {model.intermediate_size} is not cut"
    # Not at the top: it compiles the kernels.
    from tandem.kernels.cpu.linear import is_for_c

    if not is_for_c(torch.empty(2, 2, dtype=getattr(torch, model.dtype))):
        return (
            f"{model.dtype} is not multiplied by the kernels in C on this processor; set "
            "engine.dtype to float32"
        )
    return None


def _misfit(tp: int, num_kv_heads: int, segments: int) -> str | None:
    if tp & (tp - 1) or num_kv_heads % tp:
        widths = ", ".join(str(1 << i) for i in range(4) if num_kv_heads % (1 << i) == 0)
        return f"a model of {num_kv_heads} KV heads is served by {widths} processes"
    assert segments % tp == 0
    return None
