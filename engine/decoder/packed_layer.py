"""A layer's weights in the layout of the kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.layer_kinds import LayerKind
from tandem.engine.architecture.rope import RopeTables, query_scales
from tandem.engine.architecture.spec import Size
from tandem.engine.decoder.attention import attention_options
from tandem.engine.decoder.fused_layer import FusedLayer, fused_layer
from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.decoder.linears import scaled, with_bias
from tandem.engine.decoder.mixture import MixtureOfExperts
from tandem.engine.weights.weights import LayerWeights
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import Matrix


@dataclass(slots=True, frozen=True)
class PackedLayer:
    """The parts of a layer; a norm that is None does not exist."""

    kind: int  # of those of the model
    group: int  # of layers that share blocks
    place: int  # in a block of the group
    rope_table: torch.Tensor  # [max_model_len, 2, head_dim]
    query_scales: torch.Tensor | None  # [max_model_len] by position; None: 1
    attention: Mapping[str, Any]  # attention_options
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    wide_qk_norm: tuple[torch.Tensor, torch.Tensor] | None  # [q_size], [kv_size]
    output: Linear
    attention_out_norm: torch.Tensor | None  # [hidden_size]
    post_norm: torch.Tensor | None  # [hidden_size]
    gate_up: Linear | None  # None: the layer is its experts alone
    down: Linear | None
    experts: MixtureOfExperts | None
    shared_gate: Linear | None  # of what is beside the experts
    mlp_out_norm: torch.Tensor | None  # [hidden_size]
    next_norm: torch.Tensor | None  # [hidden_size] the next layer's input norm, or the final one
    fused: FusedLayer | None  # the same around attention, for few tokens


@dataclass(slots=True, frozen=True)
class LayerPacker:
    """Makes the layers of one model; the matrices may be copies in the kernels' own layout."""

    config: ModelConfig
    rope_tables: RopeTables
    kernels: Kernels
    dtype: torch.dtype  # of activations

    def pack(
        self,
        layer: LayerWeights,
        kind: LayerKind,
        kind_index: int,
        place: tuple[int, int],  # of LayerGroups.places
        next_norm: torch.Tensor | None,
    ) -> PackedLayer:
        residual = self.config.residual_multiplier
        assert residual == 1 or layer.attention_out_norm is None, "a norm would undo it"
        down_size: Size = "intermediate_size" if layer.router is None else "shared_size"
        rope_table = self.rope_tables[kind.rope]
        q_norm, k_norm = self.norm(layer.wide_q_norm), self.norm(layer.wide_k_norm)
        fused = fused_layer(self.kernels.fused, self.config, kind, layer, rope_table, self.norm)
        return PackedLayer(
            kind=kind_index,
            group=place[0],
            place=place[1],
            rope_table=rope_table,
            query_scales=query_scales(kind.rope, len(rope_table), self.dtype, rope_table.device),
            attention=attention_options(kind.window, self.config.attention_cap, layer.sinks),
            qkv=self._rows(layer.qkv, "qkv_size", layer.qkv_bias),
            qk_norm=self.norm(layer.qk_norm),
            wide_qk_norm=None if q_norm is None or k_norm is None else (q_norm, k_norm),
            output=self._output(layer.output, "q_size", layer.output_bias, residual),
            attention_out_norm=self.norm(layer.attention_out_norm),
            post_norm=self.norm(layer.post_norm),
            gate_up=None
            if layer.gate_up is None
            else self._rows(layer.gate_up, "gate_up_size", layer.gate_up_bias),
            down=None
            if layer.down is None
            else self._output(layer.down, down_size, layer.down_bias, residual),
            experts=self._experts(layer),
            shared_gate=self._linear_if_any(layer.shared_gate),
            mlp_out_norm=self.norm(layer.mlp_out_norm),
            next_norm=next_norm,
            fused=fused,
        )

    def norm(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        """Return a norm's weights. An offset is added in float32, as its sum has more digits."""
        if stored is None:
            return None
        offset = self.config.architecture.norm_offset
        return stored.float() + offset if offset else stored.to(self.dtype)

    def _linear(
        self, weight: Matrix, bias: torch.Tensor | None = None, factor: float = 1.0
    ) -> Linear:
        return scaled(with_bias(self.kernels.pack_linear(weight), bias, self.dtype), factor)

    def _rows(self, weight: Matrix, out_size: Size, bias: torch.Tensor | None) -> Linear:
        if self.kernels.pack_rows is None:
            return self._linear(weight, bias)
        return with_bias(self.kernels.pack_rows(weight, out_size), bias, self.dtype)

    def _linear_if_any(
        self, weight: Matrix | None, bias: torch.Tensor | None = None
    ) -> Linear | None:
        return None if weight is None else self._linear(weight, bias)

    def _output(
        self, weight: Matrix, in_size: Size, bias: torch.Tensor | None, factor: float
    ) -> Linear:
        if self.kernels.pack_output is None:
            return self._linear(weight, bias, factor)
        return scaled(
            with_bias(self.kernels.pack_output(weight, in_size), bias, self.dtype), factor
        )

    def _experts(self, layer: LayerWeights) -> MixtureOfExperts | None:
        mixture = self.config.mixture
        if mixture is None or layer.router is None:
            return None
        residual = self.config.residual_multiplier
        return MixtureOfExperts(mixture, layer, self.kernels, self.dtype, residual)
