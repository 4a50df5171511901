"""A layer whose products have its norms, its activation and its sums in them.

Its kernels: norm, product, rotation and store of queries, keys and values; attention; product and
sum; norm, product and activation; product and sum. They are five, in place of nine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.layer_kinds import LayerKind
from tandem.engine.decoder.kernel_set import FEW_TOKENS, FusedProducts
from tandem.engine.weights.weights import LayerWeights
from tandem.kernels.reference.quantized import rounds_inputs

# Parts of a layer that the products do not have in them.
_OTHER_PARTS = (
    "attention_out_norm",
    "mlp_out_norm",
    "wide_q_norm",
    "wide_k_norm",
    "router",
    "shared_gate",
)


@dataclass(slots=True, frozen=True)
class FusedLayer:
    """A dense layer around its attention, on the residual stream [num_tokens, hidden_size]."""

    products: FusedProducts
    weights: LayerWeights  # norms in the dtype that they are computed with
    rope_table: torch.Tensor  # [max_model_len, 2, head_dim]
    activation: str
    eps: float

    def store_kv(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,  # [num_tokens]
        slot_mapping: torch.Tensor,  # [num_tokens]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    ) -> torch.Tensor:
        """Return queries [num_tokens, num_heads, head_dim]; store keys and values in the cache."""
        weights = self.weights
        return self.products.multiply_qkv(
            hidden,
            weights.qkv,
            weights.qk_norm,
            self.rope_table,
            positions,
            slot_mapping,
            kv_cache,
            self.eps,
            norm=weights.input_norm,
            bias=weights.qkv_bias,
        )

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the results of attention, and then of the feed-forward layer, to `hidden`."""
        weights, multiply = self.weights, self.products.multiply
        multiply(attended, weights.output, bias=weights.output_bias, residual=hidden)
        opened = multiply(
            hidden,
            weights.gate_up,
            norm=weights.post_norm,
            eps=self.eps,
            bias=weights.gate_up_bias,
            activation=self.activation,
        )
        multiply(opened, weights.down, bias=weights.down_bias, residual=hidden)


def fused_layer(
    products: FusedProducts | None,
    config: ModelConfig,
    kind: LayerKind,
    weights: LayerWeights,
    rope_table: torch.Tensor,  # [max_model_len, 2, head_dim]
    norm: Callable[[torch.Tensor | None], torch.Tensor | None],  # |-> as it is computed with
) -> FusedLayer | None:
    """Return the layer, if the chip and the products have all that it needs."""
    if products is None or not products.offered(config.head_dim):
        return None
    grows = kind.rope is not None and kind.rope.query_growth
    if grows or config.residual_multiplier != 1 or weights.gate_up is None:
        return None
    if weights.input_norm is None or weights.post_norm is None:
        return None
    if any(getattr(weights, part) is not None for part in _OTHER_PARTS):
        return None
    # Within a product a norm's factor comes after the rounding: for few tokens and for many alike,
    # or not at all.
    if products.max_tokens == FEW_TOKENS and (
        rounds_inputs(weights.qkv) or rounds_inputs(weights.gate_up)
    ):
        return None
    weights = replace(
        weights,
        input_norm=norm(weights.input_norm),
        post_norm=norm(weights.post_norm),
        qk_norm=norm(weights.qk_norm),
    )
    activation = "gelu" if config.activation == "gelu_tanh" else "silu"
    return FusedLayer(products, weights, rope_table, activation, config.rms_norm_eps)
