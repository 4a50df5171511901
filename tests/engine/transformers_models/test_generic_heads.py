"""Attention of transformers whose heads one kernel rotates: which, and to the same result."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.transformers_models.generic_attention import (
    INTERFACE,
    Angles,
    AttentionCall,
    attend,
    attend_rotated,
    rotary_table,
)
from tandem.engine.transformers_models.generic_heads import fuse_heads
from tandem.engine.transformers_models.generic_parts import pack_linears, swap_norms
from tandem.kernels.reference.kv_store import store_qkv

HEAD_DIM, NUM_KV_HEADS, NUM_TOKENS = 16, 2, 5


class Doubled(Qwen3Attention):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        return super().forward(2 * hidden_states, **named)


class Scaled(Qwen3Attention):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        out, weights = super().forward(hidden_states, **named)
        return 0.99 * out, weights


class ByPosition(Qwen3Attention):  # type: ignore[misc]
    """It differs only at positions that no comparison has."""

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        far = named["position_ids"][..., None] > 1000
        return super().forward(hidden_states * (1 + far), **named)


class Turned(Qwen3Attention):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        cos, sin = named.pop("position_embeddings")
        return super().forward(hidden_states, position_embeddings=(cos, -sin), **named)


def mixed(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return something of q's shape that depends on every number."""
    k, v = (each.repeat_interleave(q.shape[1] // NUM_KV_HEADS, dim=1) for each in (k, v))
    return q * k + v


def mixed_rotated(call: AttentionCall, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
    qkv = qkv.view(NUM_TOKENS, -1, HEAD_DIM)
    slots, q = torch.arange(NUM_TOKENS), qkv[:, : -2 * NUM_KV_HEADS]
    cache = torch.zeros(1, 2, NUM_KV_HEADS, NUM_TOKENS, HEAD_DIM)
    store_qkv(qkv, call.qk_norm, rotary_table(angles), slots, slots, cache, call.eps, q)
    return mixed(call, q, *cache[0].transpose(1, 2))


def outcome(kind: type[nn.Module], biases: tuple[str, ...] = ()) -> bool:
    """Return whether the module is fused, after a look at its results before and then."""
    config = Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    config._attn_implementation = INTERFACE
    module = kind(config, 0).eval().requires_grad_(False)
    for name in biases:
        linear = module.get_submodule(name)
        linear.bias = nn.Parameter(torch.randn(linear.out_features), requires_grad=False)
    for norm in (module.q_norm, module.k_norm):
        norm.weight.normal_()
    kernels = load_kernels("torch")
    pack_linears(module, [("q_proj", "k_proj", "v_proj")], kernels)
    swap_norms(module, kernels, torch.float32)
    positions = torch.arange(NUM_TOKENS)[None]
    x = torch.randn(1, NUM_TOKENS, 32)
    named = {
        "position_embeddings": Qwen3RotaryEmbedding(config)(x, positions),
        "attention_mask": None,
        "position_ids": positions,
    }
    attend.set(mixed)
    attend_rotated.set(mixed_rotated)
    expected, _ = module(x, **named)
    fuse_heads({module: named | {"hidden_states": x}}, HEAD_DIM)
    torch.testing.assert_close(module(x, **named)[0], expected, rtol=1e-4, atol=1e-5)
    return "forward" in vars(module)


@pytest.mark.parametrize(
    "biases", [(), ("o_proj",), ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")]
)
def test_heads_are_fused_with_their_norms_and_any_biases(biases: tuple[str, ...]) -> None:
    assert outcome(Qwen3Attention, biases)


@pytest.mark.parametrize("kind", [Doubled, Scaled, ByPosition, Turned])
def test_a_module_that_computes_something_else_stays(kind: type[nn.Module]) -> None:
    assert not outcome(kind)
