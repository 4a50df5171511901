"""Random weights of any shape, made on the device: benchmarks that need no files."""

import torch

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.weights import ModelWeights, empty_weights, spread_qk_norm

# Standard deviation of the logits: far above rounding, so greedy answers have no ties.
_LOGIT_STD = 4.0


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Weights of `config`'s shape in memory of `device`; the same for a seed and kind of device.

    Every matrix keeps the scale of what passes through it, so activations stay finite at any depth
    and logits have a standard deviation of about 4.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)

    def norm(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.normal_(1.0, 0.1, generator=generator)

    matrix(weights.embedding)
    for layer in weights.layers:
        norm(layer.input_norm, layer.post_norm)
        matrix(layer.qkv, layer.output, layer.gate_up, layer.down)
        if layer.qk_norm is not None:
            norm(layer.qk_norm)
            spread_qk_norm(layer, config)
    norm(weights.final_norm)
    weights.final_norm.mul_(_LOGIT_STD)
    if weights.lm_head is not weights.embedding:
        matrix(weights.lm_head)
    return weights
