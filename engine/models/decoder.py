"""The decoder: tokens of one batch in, logits out, keys and values into the paged cache."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.engine.kernel_set import Kernels, StepOptions
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.weights import LayerWeights, ModelWeights
from tandem.engine.step.batch import Batch
from tandem.kernels.reference.linear import Linear


@dataclass(slots=True, frozen=True)
class _Layer:
    """A layer's weights as they are computed with."""

    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear
    post_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear
    down: Linear


class Model:
    """A dense decoder over `weights`; holds no state between batches.

    The matrices may be held in a layout of the kernels' own, and not as `weights` has them.
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
        self._layers = [self._pack(layer) for layer in weights.layers]
        self._final_norm = weights.final_norm.to(self._dtype)
        self._lm_head = kernels.pack_linear(weights.lm_head)

    def forward(
        self,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
    ) -> torch.Tensor:
        """Logits [num_samples, vocab_size] of `batch.logits_indices`; the cache in place.

        `on_layers(n)` is called for each of `boundaries` as soon as the first n layers' K/V is
        stored: in stream order on a GPU, where nothing has been computed yet.
        """
        kernels, eps = self._kernels, self._config.rms_norm_eps
        options = kernels.step_options(
            batch, self._rope_table, kv_cache[:, 0], self._config.num_heads
        )
        # [num_tokens, hidden_size]: the residual stream, and what the next matrix takes
        shape = len(batch.token_ids), self._config.hidden_size
        hidden = torch.empty(shape, dtype=self._dtype, device=self._embedding.device)
        normed = torch.empty_like(hidden)
        kernels.embed(batch.token_ids, self._embedding, hidden)
        kernels.rms_norm(hidden, self._layers[0].input_norm, eps, normed)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            layer_cache = kv_cache[:, index]
            q = self._store_kv(normed, layer, batch, layer_cache, options)
            if on_layers is not None and index + 1 in boundaries:
                on_layers(index + 1)
            if index < last or batch.samples_all:
                attended = self._attention(q, batch, layer_cache, options)
            else:
                # What the last layer makes of the other tokens, nothing reads.
                q, hidden = (t.index_select(0, batch.logits_indices) for t in (q, hidden))
                normed = torch.empty_like(hidden)
                attended = self._sampled_attention(q, batch, layer_cache, options)
            kernels.add_rms_norm(layer.output(attended), hidden, layer.post_norm, eps, normed)
            added = self._mlp(normed, layer)
            norm = self._final_norm if index == last else self._layers[index + 1].input_norm
            kernels.add_rms_norm(added, hidden, norm, eps, normed)
        return self._lm_head(normed)

    def _pack(self, layer: LayerWeights) -> _Layer:
        pack, dtype = self._kernels.pack_linear, self._dtype
        return _Layer(
            input_norm=layer.input_norm.to(dtype),
            qkv=_with_bias(pack(layer.qkv), layer.qkv_bias, dtype),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm.to(dtype),
            output=pack(layer.output),
            post_norm=layer.post_norm.to(dtype),
            gate_up=pack(layer.gate_up),
            down=pack(layer.down),
        )

    def _store_kv(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: _Layer,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        """The queries [num_tokens, num_heads, head_dim]; keys and values go into the cache."""
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
        self._decode_attention(
            q[: batch.num_decodes],
            kv_cache,
            batch.decode_block_tables,
            batch.decode_context_lens,
            out[: batch.num_decodes],
            options.paged_decode_attention,
        )
        if batch.num_prefills:
            self._kernels.prefill_attention(
                q[batch.num_decodes :],
                kv_cache,
                batch.prefill_block_tables,
                batch.prefill_cu_seqlens,
                batch.prefill_context_lens,
                batch.max_query_len,
                self._scale,
                out[batch.num_decodes :],
                **options.prefill_attention,
            )
        return out.flatten(1)

    def _sampled_attention(
        self,
        q: torch.Tensor,  # [num_samples, num_heads, head_dim]
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        tables, lens = batch.sampled_block_tables, batch.sampled_positions
        self._decode_attention(q, kv_cache, tables, lens, out, options.sampled_attention)
        return out.flatten(1)

    def _decode_attention(
        self,
        q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        block_tables: torch.Tensor,  # [num_seqs, max_blocks]
        context_lens: torch.Tensor,  # [num_seqs]
        out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
        options: Mapping[str, Any],
    ) -> None:
        if q.shape[0]:
            self._kernels.paged_decode_attention(
                q, kv_cache, block_tables, context_lens, self._scale, out, **options
            )

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
