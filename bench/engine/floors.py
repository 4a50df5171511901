"""The least that a step must move or compute."""

import math

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.spec import TensorSpec


def linear_params(model: ModelConfig) -> int:
    """Return the number of weights of the matrices that a token passes, without the head."""
    return sum(
        _passed(spec, model)
        for layer in range(model.num_layers)
        for spec in model.layer_tensors(layer)
        if spec.kind == "matrix"
    )


def _passed(spec: TensorSpec, model: ModelConfig) -> int:
    """Return the weights of a matrix, or of a token's experts alone."""
    num_weights = math.prod(spec.slot_shape(model))
    if not spec.slot.startswith("experts_") or model.mixture is None:
        return num_weights
    return num_weights // model.num_experts * model.mixture.routing.num_chosen


def kv_bytes_per_token(model: ModelConfig) -> int:
    """Return the bytes of one position's keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _item_bytes(model)


def decode_bytes(model: ModelConfig, num_context_tokens: float) -> float:
    """Return the bytes that a decode step reads: all matrices, the head, the contexts' K/V."""
    params = linear_params(model) + model.hidden_size * model.vocab_size
    return params * _item_bytes(model) + num_context_tokens * kv_bytes_per_token(model)


def prefill_flops(model: ModelConfig, num_tokens: int) -> float:
    """Return the operations of a prompt: matrices, causal attention, the head of its last token.

    Of the last layer, only keys and values are needed of the tokens before the last.
    """
    in_layer = linear_params(model) // model.num_layers
    key_value = 2 * model.hidden_size * model.num_kv_heads * model.head_dim
    full_layers = (model.num_layers - 1) * num_tokens + 1
    matrices = 2.0 * (in_layer * full_layers + key_value * (num_tokens - 1))
    pairs = (model.num_layers - 1) * num_tokens * (num_tokens + 1) / 2 + num_tokens
    attention = 4.0 * model.num_heads * model.head_dim * pairs
    return matrices + attention + 2.0 * model.hidden_size * model.vocab_size


def _item_bytes(model: ModelConfig) -> int:
    return int(getattr(torch, model.dtype).itemsize)
