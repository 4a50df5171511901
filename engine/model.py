"""The decoder: tokens of one batch in, logits out, keys and values into the paged cache."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.engine.batch import Batch
from tandem.engine.model_config import ModelConfig
from tandem.engine.rope import apply_rope
from tandem.engine.weights import LayerWeights, ModelWeights


@dataclass(slots=True, frozen=True)
class AttentionKernels:
    """The three operations that touch the cache; signatures as in tandem.kernels.reference."""

    store_kv: Callable[..., None]
    paged_decode_attention: Callable[..., None]
    prefill_attention: Callable[..., None]


class Model:
    """A dense decoder over `weights`; holds no state between batches."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rope_table: torch.Tensor,  # [max_model_len, 2, head_dim]
        kernels: AttentionKernels,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope_table = rope_table
        self._kernels = kernels
        self._scale = config.head_dim**-0.5

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
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        cos, sin = self._rope_table.index_select(0, batch.positions).split_with_sizes([1, 1], dim=1)
        for index, layer in enumerate(self._weights.layers):
            q = self._store_kv(hidden, layer, batch, kv_cache[:, index], cos, sin)
            if on_layers is not None and index + 1 in boundaries:
                on_layers(index + 1)
            hidden = self._attention(hidden, q, layer, batch, kv_cache[:, index])
            hidden = self._mlp(hidden, layer)
        if batch.logits_indices.shape[0] != hidden.shape[0] or batch.num_prefills:
            hidden = hidden.index_select(0, batch.logits_indices)
        return F.linear(self._norm(hidden, self._weights.final_norm), self._weights.lm_head)

    def _store_kv(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        layer: LayerWeights,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """The queries [num_tokens, num_heads, head_dim]; keys and values go into the cache."""
        config = self._config
        num_tokens, num_heads, num_kv_heads = hidden.shape[0], config.num_heads, config.num_kv_heads
        qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv)
        qkv = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim)
        qk = qkv[:, : num_heads + num_kv_heads]
        normed = qk
        if layer.qk_norm is not None:
            normed = F.rms_norm(qk, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        apply_rope(normed, cos, sin, out=qk)
        kv = qkv[:, num_heads:].view(num_tokens, 2, num_kv_heads, config.head_dim)
        self._kernels.store_kv(kv, kv_cache, batch.slot_mapping)
        return qkv[:, :num_heads]

    def _attention(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        layer: LayerWeights,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    ) -> torch.Tensor:
        kernels = self._kernels
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.num_decodes:
            kernels.paged_decode_attention(
                q[: batch.num_decodes],
                kv_cache,
                batch.decode_block_tables,
                batch.decode_context_lens,
                self._scale,
                out[: batch.num_decodes],
            )
        if batch.num_prefills:
            kernels.prefill_attention(
                q[batch.num_decodes :],
                kv_cache,
                batch.prefill_block_tables,
                batch.prefill_cu_seqlens,
                batch.prefill_context_lens,
                batch.max_query_len,
                self._scale,
                out[batch.num_decodes :],
            )
        return torch.addmm(hidden, out.view(hidden.shape[0], -1), layer.output)

    def _mlp(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate_up = F.linear(self._norm(hidden, layer.post_norm), layer.gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)
