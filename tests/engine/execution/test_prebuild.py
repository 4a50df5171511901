"""Models without memory, whose steps build kernels."""

import torch

from tandem.engine.architecture.config import load_model_config
from tandem.engine.execution.prebuild import META, on_meta
from tandem.engine.weights.weights import empty_weights
from tandem.models.paths import BUNDLED_MODEL


def test_weights_without_memory_have_the_shapes_and_strides_of_those_with_it() -> None:
    config = load_model_config(BUNDLED_MODEL)
    weights = empty_weights(config, torch.bfloat16, torch.device("cpu"))
    found = on_meta(weights)
    assert found.embedding.device == found.layers[0].qkv.device == META
    assert found.embedding.shape == weights.embedding.shape
    assert (found.lm_head is found.embedding) == (weights.lm_head is weights.embedding)
    assert len(found.layers) == len(weights.layers)
