"""The decoder: from the tokens of a batch to logits, with keys and values in the paged cache."""

from collections.abc import Callable, Collection

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.layer_kinds import LayerKind
from tandem.engine.architecture.rope import RopeTables
from tandem.engine.batch.batch import Batch
from tandem.engine.decoder.attention import attend_all, attend_last
from tandem.engine.decoder.kernel_set import Kernels, StepOptions
from tandem.engine.decoder.linears import capped, scaled
from tandem.engine.decoder.packed_layer import LayerPacker, PackedLayer
from tandem.engine.weights.weights import ModelWeights
from tandem.kernels.reference.linear import Linear


class Model:
    """A decoder over `weights`; holds no state between batches.

    The matrices may be copies in a layout of the kernels' own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rope_tables: RopeTables,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._rope_tables = rope_tables
        self._kernels = kernels
        self._scale = config.query_scale or config.head_dim**-0.5
        is_gelu = config.activation == "gelu_tanh"
        self._activate = kernels.gelu_mul if is_gelu else kernels.silu_mul
        self._dtype = kernels.activation_dtype(weights.embedding)
        self._embedding = weights.embedding
        # As transformers does, whose sums models were trained with.
        self._embedding_multiplier = float(
            torch.tensor(config.embedding_multiplier, dtype=weights.embedding.dtype)
        )
        places = config.layer_groups.places
        # With their groups: what layers share in a step depends on the blocks too.
        kinds = [(config.layer_kind(index), group) for index, (group, _) in enumerate(places)]
        self._kinds = list(dict.fromkeys(kinds))
        packer = LayerPacker(config, rope_tables, kernels, self._dtype)
        self._first_norm, *next_norms = (
            packer.norm(norm)
            for norm in (*(layer.input_norm for layer in weights.layers), weights.final_norm)
        )
        self._layers = [
            packer.pack(layer, kind[0], self._kinds.index(kind), place, next_norm)
            for layer, kind, place, next_norm in zip(
                weights.layers, kinds, places, next_norms, strict=True
            )
        ]
        self._max_fused_tokens = 0
        if kernels.fused is not None and all(layer.fused for layer in self._layers):
            self._max_fused_tokens = kernels.fused.max_tokens
        head = weights.lm_head
        lm_head = scaled((kernels.pack_head or kernels.pack_linear)(head), config.logit_multiplier)
        self._lm_head = capped(lm_head, config.logit_cap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] of rows of `hidden`."""
        return self._lm_head(hidden)

    def hidden(
        self,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
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
        options = [
            self._step_options(kind, batch.of_group(group), kv_cache) for kind, group in self._kinds
        ]
        hidden = self._embed(batch.token_ids)
        is_fused = hidden.shape[0] <= self._max_fused_tokens
        normed = hidden if is_fused else self._normed(hidden, self._first_norm)
        kernels, last = self._kernels, len(self._layers) - 1
        layer_caches = kv_cache.unbind(1)
        for index, layer in enumerate(self._layers):
            layer_cache, my_batch = layer_caches[layer.place], batch.of_group(layer.group)
            my_options = options[layer.kind]
            fused = layer.fused if is_fused else None
            if fused is not None:
                q = fused.store_kv(hidden, batch.positions, my_batch.slot_mapping, layer_cache)
            else:
                q = self._store_kv(normed, layer, my_batch, layer_cache, my_options)
            if on_layers is not None and index + 1 in boundaries:
                on_layers(index + 1)
            if index < last or batch.samples_all or of_all:
                attended = attend_all(
                    kernels, q, my_batch, layer_cache, self._scale, layer.attention, my_options
                )
            else:
                # No later layer reads the other tokens.
                q, hidden = (t.index_select(0, batch.logits_indices) for t in (q, hidden))
                attended = torch.empty_like(q)
                attend_last(
                    kernels,
                    q,
                    my_batch.sampled,
                    layer_cache,
                    self._scale,
                    attended,
                    layer.attention,
                    my_options.sampled_attention,
                )
            if fused is not None:
                fused.finish(attended.flatten(1), hidden)
            else:
                normed = self._finish_layer(attended.flatten(1), layer, hidden)
        return self._normed(hidden, self._layers[-1].next_norm) if is_fused else normed

    def _step_options(self, kind: LayerKind, batch: Batch, kv_cache: torch.Tensor) -> StepOptions:
        table, num_heads = self._rope_tables[kind.rope], self._config.num_heads
        return self._kernels.step_options(batch, table, kv_cache[:, 0], num_heads, kind.window)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the residual stream [num_tokens, hidden_size]."""
        shape = token_ids.shape[0], self._config.hidden_size
        hidden = torch.empty(shape, dtype=self._dtype, device=self._embedding.device)
        self._kernels.embed(token_ids, self._embedding, hidden)
        if self._embedding_multiplier != 1:
            hidden.mul_(self._embedding_multiplier)
        return hidden

    def _normed(self, hidden: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return hidden
        normed = torch.empty_like(hidden)
        self._kernels.rms_norm(hidden, norm, self._config.rms_norm_eps, normed)
        return normed

    def _store_kv(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: PackedLayer,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        """Return queries [num_tokens, num_heads, head_dim]; store keys and values in the cache."""
        config = self._config
        num_all_heads = config.num_heads + 2 * config.num_kv_heads
        fused = layer.qkv(normed)
        if layer.wide_qk_norm is not None:
            parts = fused.split_with_sizes([config.q_size, config.kv_size, config.kv_size], 1)
            for part, weight in zip(parts[:2], layer.wide_qk_norm, strict=True):
                self._kernels.rms_norm(part, weight, config.rms_norm_eps, part)
        qkv = fused.view(-1, num_all_heads, config.head_dim)
        q = qkv[:, : config.num_heads]
        self._kernels.store_qkv(
            qkv,
            layer.qk_norm,
            layer.rope_table,
            batch.positions,
            batch.slot_mapping,
            kv_cache,
            config.rms_norm_eps,
            q,
            **options.store_qkv,
        )
        if layer.query_scales is not None:
            q.mul_(layer.query_scales[batch.positions].view(-1, 1, 1))
        return q

    def _finish_layer(
        self,
        attended: torch.Tensor,  # [num_tokens, num_heads * head_dim]
        layer: PackedLayer,
        hidden: torch.Tensor,  # [num_tokens, hidden_size] the residual stream, in place
    ) -> torch.Tensor:
        """Return [num_tokens, hidden_size], the input of the next layer."""
        attention = layer.output(attended)
        normed = self._add(attention, layer.attention_out_norm, hidden, layer.post_norm)
        return self._add(self._mlp(normed, layer), layer.mlp_out_norm, hidden, layer.next_norm)

    def _add(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size], changed
        norm: torch.Tensor | None,  # of x
        hidden: torch.Tensor,  # [num_tokens, hidden_size] the residual stream, in place
        next_norm: torch.Tensor | None,  # of the sum
    ) -> torch.Tensor:
        """Add the normed x to `hidden` and return the normed sum."""
        if norm is not None:
            self._kernels.rms_norm(x, norm, self._config.rms_norm_eps, x)
        if next_norm is None:
            return hidden.add_(x)
        self._kernels.add_rms_norm(x, hidden, next_norm, self._config.rms_norm_eps, x)
        return x

    def _mlp(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        layer: PackedLayer,
    ) -> torch.Tensor:
        if layer.gate_up is None or layer.down is None:
            assert layer.experts is not None
            return layer.experts(normed)
        dense = self._dense(normed, layer.gate_up, layer.down)
        if layer.shared_gate is not None:
            dense.mul_(layer.shared_gate(normed).sigmoid_())
        return dense if layer.experts is None else dense.add_(layer.experts(normed))

    def _dense(self, normed: torch.Tensor, gate_up_of: Linear, down: Linear) -> torch.Tensor:
        gate_up = gate_up_of(normed)
        shape = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
        self._activate(gate_up, out)
        return down(out)
