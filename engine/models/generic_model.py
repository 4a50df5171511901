"""A decoder of transformers' modelling code with Tandem's attention, products and norms."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.kernel_set import Kernels, StepOptions
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.generic_attention import AttentionCall, attend
from tandem.engine.models.generic_build import build_generic
from tandem.engine.models.generic_parts import pack_linears, swap_mlps, swap_norms
from tandem.engine.step.batch import Batch


class GenericModel:
    """The same face as tandem.engine.models.decoder.Model; holds no state between batches."""

    def __init__(
        self, folder: str | Path, config: ModelConfig, kernels: Kernels, device: torch.device
    ) -> None:
        self._config = config
        self.places = config.layer_groups.places
        self._kernels = kernels
        dtype = getattr(torch, config.dtype)
        model, siblings = build_generic(folder, dtype, device)
        self._dtype = kernels.activation_dtype(model.get_input_embeddings().weight)
        pack_linears(model, siblings, kernels)
        if self._dtype != dtype:
            model.to(self._dtype)
        swap_mlps(model, kernels, self._dtype, device)
        swap_norms(model, kernels, self._dtype)
        # The trunk computes hidden states; the rest, with a trunk that passes them on, the logits.
        name, self._trunk = _trunk_of(model)
        setattr(model, name, _PassedOn())
        self._head = model
        # Modelling code rotates queries and keys: the store kernel gets a rotation by nothing.
        self._no_rotation = torch.zeros(1, 2, config.head_dim, dtype=dtype, device=device)
        self._no_rotation[:, 0] = 1

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] of rows of `hidden`."""
        out = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        return out.logits[0]  # type: ignore[no-any-return]

    def hidden(
        self,
        batch: Batch,
        kv_cache: torch.Tensor,  # [num_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
        *,
        of_all: bool = False,
    ) -> torch.Tensor:
        """Return the operands of `logits`; fill the cache. All as in decoder.Model.hidden."""
        positions = torch.zeros_like(batch.positions)
        step = _Step(self, batch, positions, kv_cache, on_layers, boundaries)
        token = attend.set(step.attend)
        try:
            out = self._trunk(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.clamp(min=0).unsqueeze(0),
                use_cache=False,
            )
        finally:
            attend.reset(token)
        hidden: torch.Tensor = out.last_hidden_state[0]
        if of_all or batch.samples_all:
            return hidden
        return hidden.index_select(0, batch.logits_indices)

    def step_options(
        self, batch: Batch, positions: torch.Tensor, kv_cache: torch.Tensor, window: int
    ) -> StepOptions:
        """Return the kernels' options of all layers of a step that have this window."""
        return self._kernels.step_options(
            replace(batch, positions=positions),
            self._no_rotation,
            kv_cache[:, 0],
            self._config.num_heads,
            window,
        )

    def store(
        self,
        qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        positions: torch.Tensor,  # [num_tokens] zeros
        batch: Batch,
        cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        """Store keys and values; return the queries."""
        q = qkv[:, : self._config.num_heads]
        where = positions, batch.slot_mapping
        self._kernels.store_qkv(
            qkv, None, self._no_rotation, *where, cache, 1e-6, q, **options.store_qkv
        )
        return q

    def attention(
        self,
        call: AttentionCall,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        batch: Batch,
        cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, head_dim] over the stored keys and values."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decodes, prefills, decodes = len(batch.decodes), batch.prefills, batch.decodes
        kinds: dict[str, Any] = {}
        if call.soft_cap:
            kinds["soft_cap"] = call.soft_cap
        if call.window:
            kinds["window"] = call.window
        if call.sinks is not None:
            kinds["sinks"] = call.sinks
        if num_decodes:
            self._kernels.paged_decode_attention(
                q[:num_decodes],
                cache,
                decodes.block_tables,
                decodes.context_lens,
                call.scale,
                out[:num_decodes],
                **kinds,
                **options.paged_decode_attention,
            )
        if len(prefills):
            self._kernels.prefill_attention(
                q[num_decodes:],
                cache,
                prefills.block_tables,
                batch.prefill_cu_seqlens,
                prefills.context_lens,
                batch.max_query_len,
                call.scale,
                out[num_decodes:],
                **kinds,
                **options.prefill_attention,
            )
        return out


@dataclass(slots=True)
class _Step:
    """One pass over one batch: the attention of its layers."""

    model: GenericModel
    batch: Batch
    positions: torch.Tensor  # [num_tokens] zeros
    kv_cache: torch.Tensor  # [num_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
    on_layers: Callable[[int], None] | None
    boundaries: Collection[int]
    options: dict[tuple[int, int], StepOptions] = field(default_factory=dict)  # by window, group

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        group, place = self.model.places[call.layer]
        cache, batch = self.kv_cache[:, place], self.batch.of_group(group)
        if (call.window, group) not in self.options:
            self.options[call.window, group] = self.model.step_options(
                batch, self.positions, self.kv_cache, call.window
            )
        options = self.options[call.window, group]
        head_dim, value_size = cache.shape[-1], v.shape[-1]
        # Heads of other sizes are padded with zeros, which change no score.
        qkv = torch.cat([_padded(x, head_dim) for x in (q, k, v)], dim=1)
        q = self.model.store(qkv, self.positions, batch, cache, options)
        if self.on_layers is not None and call.layer + 1 in self.boundaries:
            self.on_layers(call.layer + 1)
        out = self.model.attention(call, q, batch, cache, options)
        return out[..., :value_size]


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _trunk_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the part of a causal language model that ends with hidden states, and its name."""
    children = model.named_children()
    return next(each for each in children if isinstance(each[1], PreTrainedModel))


class _PassedOn(nn.Module):
    """A trunk that returns its input embeddings as hidden states."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> "_Outputs":
        return _Outputs(inputs_embeds)


class _Outputs:
    """The outputs of a trunk, as a head reads them: hidden states, and None for all others."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]
