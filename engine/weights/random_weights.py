"""Random weights of any shape, made on the device, for benchmarks that need no files."""

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.weights.weights import ModelWeights, empty_weights, weight_parts

# Standard deviation of the logits: far above rounding, so greedy answers have no ties.
_LOGIT_STD = 4.0
_MEAN_AND_STD = {"norm": (1.0, 0.1), "bias": (0.0, 0.1), "matrix": (0.0, None)}  # None: by its rows


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Make weights of `config`'s shape on `device`; the same for a seed and kind of device.

    Every matrix keeps the scale of what passes through it, so activations stay finite at any depth
    and logits have a standard deviation of about 4.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for part in weight_parts(weights, config):
        mean, std = _MEAN_AND_STD[part.spec.kind]
        tensor = part.stored
        tensor.normal_(mean, std or part.rows.shape[-1] ** -0.5, generator=generator)
        part.settle()
    weights.final_norm.mul_(_LOGIT_STD)
    return weights
