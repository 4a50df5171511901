"""The decoder: from the tokens of a batch to logits, with keys and values in the paged cache."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.engine.kernel_set import Kernels, StepOptions
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.weights import LayerWeights, ModelWeights
from tandem.engine.step.batch import Batch, Rows
from tandem.kernels.reference.linear import Linear


@dataclass(slots=True, frozen=True)
class _Layer:
    """A layer's weights in the layout of the kernels."""

    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear
    post_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear
    down: Linear
    next_norm: torch.Tensor  # [hidden_size] the next layer's input norm, or the final one


class Model:
    """A dense decoder over `weights`; holds no state between batches.

    The matrices may be copies in a layout of the kernels' own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rope_table: torch.Tensor,  # [max_model_len, 2, head_dim]
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._rope_table = rope_table
        self._kernels = kernels
        self._scale = config.head_dim**-0.5
        self._dtype = kernels.activation_dtype(weights.embedding)
        self._embedding = weights.embedding
        self._first_norm, *next_norms = (
            norm.to(self._dtype)
            for norm in (*(layer.input_norm for layer in weights.layers), weights.final_norm)
        )
        pairs = zip(weights.layers, next_norms, strict=True)
        self._layers = [self._pack(layer, next_norm) for layer, next_norm in pairs]
        self._lm_head = kernels.pack_linear(weights.lm_head)

    def forward(
        self,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
    ) -> torch.Tensor:
        """Return logits [num_samples, vocab_size] of `batch.logits_indices`; fill the cache.

        `on_layers` and `boundaries` are as in `hidden`.
        """
        return self.logits(self.hidden(batch, kv_cache, on_layers, boundaries))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] of rows of `hidden`."""
        return self._lm_head(hidden)

    def hidden(
        self,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
        *,
        of_all: bool = False,
    ) -> torch.Tensor:
        """Return the operands [num_samples, hidden_size] of `logits`; fill the cache.

        They are those of `batch.logits_indices`, or with `of_all` those of all tokens.
        `on_layers(n)` is called for each of `boundaries` as soon as the first n layers' K/V is
        stored: on a GPU in stream order, before anything has been computed.
        """
        options = self._kernels.step_options(
            batch, self._rope_table, kv_cache[:, 0], self._config.num_heads
        )
        hidden, normed = self._embed(batch.token_ids)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            layer_cache = kv_cache[:, index]
            q = self._store_kv(normed, layer, batch, layer_cache, options)
            if on_layers is not None and index + 1 in boundaries:
                on_layers(index + 1)
            if index < last or batch.samples_all or of_all:
                attended = self._attention(q, batch, layer_cache, options)
            else:
                # No later layer reads the other tokens.
                q, hidden = (t.index_select(0, batch.logits_indices) for t in (q, hidden))
                normed = torch.empty_like(hidden)
                attended = torch.empty_like(q)
                self._decode_attention(
                    q, layer_cache, batch.sampled, attended, options.sampled_attention
                )
            self._finish_layer(attended.flatten(1), layer, hidden, normed)
        return normed

    def _embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream [num_tokens, hidden_size] and its norm for the first layer."""
        shape = len(token_ids), self._config.hidden_size
        hidden = torch.empty(shape, dtype=self._dtype, device=self._embedding.device)
        normed = torch.empty_like(hidden)
        self._kernels.embed(token_ids, self._embedding, hidden)
        self._kernels.rms_norm(hidden, self._first_norm, self._config.rms_norm_eps, normed)
        return hidden, normed

    def _pack(self, layer: LayerWeights, next_norm: torch.Tensor) -> _Layer:
        pack, dtype = self._kernels.pack_linear, self._dtype
        return _Layer(
            qkv=_with_bias(pack(layer.qkv), layer.qkv_bias, dtype),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm.to(dtype),
            output=pack(layer.output),
            post_norm=layer.post_norm.to(dtype),
            gate_up=pack(layer.gate_up),
            down=pack(layer.down),
            next_norm=next_norm,
        )

    def _store_kv(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: _Layer,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        """Return queries [num_tokens, num_heads, head_dim]; store keys and values in the cache."""
        config = self._config
        num_all_heads = config.num_heads + 2 * config.num_kv_heads
        qkv = layer.qkv(normed).view(-1, num_all_heads, config.head_dim)
        q = qkv[:, : config.num_heads]
        self._kernels.store_qkv(
            qkv,
            layer.qk_norm,
            self._rope_table,
            batch.positions,
            batch.slot_mapping,
            kv_cache,
            config.rms_norm_eps,
            q,
            **options.store_qkv,
        )
        return q

    def _attention(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decodes, prefills = len(batch.decodes), batch.prefills
        self._decode_attention(
            q[:num_decodes],
            kv_cache,
            batch.decodes,
            out[:num_decodes],
            options.paged_decode_attention,
        )
        if len(prefills):
            self._kernels.prefill_attention(
                q[num_decodes:],
                kv_cache,
                prefills.block_tables,
                batch.prefill_cu_seqlens,
                prefills.context_lens,
                batch.max_query_len,
                self._scale,
                out[num_decodes:],
                **options.prefill_attention,
            )
        return out

    def _decode_attention(
        self,
        q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        rows: Rows,  # num_seqs
        out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
        options: Mapping[str, Any],
    ) -> None:
        if len(rows):
            self._kernels.paged_decode_attention(
                q, kv_cache, rows.block_tables, rows.context_lens, self._scale, out, **options
            )

    def _finish_layer(
        self,
        attended: torch.Tensor,  # [num_tokens, num_heads * head_dim]
        layer: _Layer,
        hidden: torch.Tensor,  # [num_tokens, hidden_size] the residual stream, in place
        normed: torch.Tensor,  # [num_tokens, hidden_size] the input of the next layer
    ) -> None:
        kernels, eps = self._kernels, self._config.rms_norm_eps
        kernels.add_rms_norm(layer.output(attended), hidden, layer.post_norm, eps, normed)
        kernels.add_rms_norm(self._mlp(normed, layer), hidden, layer.next_norm, eps, normed)

    def _mlp(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: _Layer,
    ) -> torch.Tensor:
        gate_up = layer.gate_up(normed)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return layer.down(out)


def _with_bias(linear: Linear, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    """Return `linear` with `bias` [out] added to its results."""
    if bias is None:
        return linear
    addend = bias.to(dtype)
    return lambda x: linear(x).add_(addend)
