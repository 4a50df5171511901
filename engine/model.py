"""The decoder: tokens of one batch in, logits out, keys and values into the paged cache."""

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F

from tandem.engine.batch import Batch
from tandem.engine.kernel_set import Kernels
from tandem.engine.model_config import ModelConfig
from tandem.engine.weights import LayerWeights, ModelWeights


class Model:
    """A dense decoder over `weights`; holds no state between batches."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rope_table: torch.Tensor,  # [max_model_len, 2, head_dim]
        kernels: Kernels,
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
        kernels, eps = self._kernels, self._config.rms_norm_eps
        weights = self._weights
        # [num_tokens, hidden_size]: the residual stream, and what the next matrix takes
        hidden = weights.embedding.new_empty(len(batch.token_ids), self._config.hidden_size)
        normed = torch.empty_like(hidden)
        kernels.embed(batch.token_ids, weights.embedding, hidden)
        kernels.rms_norm(hidden, weights.layers[0].input_norm, eps, normed)
        for index, layer in enumerate(weights.layers):
            q = self._store_kv(normed, layer, batch, kv_cache[:, index])
            if on_layers is not None and index + 1 in boundaries:
                on_layers(index + 1)
            attended = self._attention(q, batch, kv_cache[:, index])
            kernels.add_rms_norm(
                F.linear(attended, layer.output), hidden, layer.post_norm, eps, normed
            )
            added = self._mlp(normed, layer)
            if index + 1 < len(weights.layers):
                next_norm = weights.layers[index + 1].input_norm
                kernels.add_rms_norm(added, hidden, next_norm, eps, normed)
        if batch.logits_indices.shape[0] != hidden.shape[0] or batch.num_prefills:
            hidden, added = (t.index_select(0, batch.logits_indices) for t in (hidden, added))
        kernels.add_rms_norm(added, hidden, weights.final_norm, eps, added)
        return F.linear(added, weights.lm_head)

    def _store_kv(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: LayerWeights,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    ) -> torch.Tensor:
        """The queries [num_tokens, num_heads, head_dim]; keys and values go into the cache."""
        config = self._config
        num_all_heads = config.num_heads + 2 * config.num_kv_heads
        qkv = F.linear(normed, layer.qkv).view(-1, num_all_heads, config.head_dim)
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
        )
        return q

    def _attention(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
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
        return out.flatten(1)

    def _mlp(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: LayerWeights,
    ) -> torch.Tensor:
        gate_up = F.linear(normed, layer.gate_up)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return F.linear(out, layer.down)
