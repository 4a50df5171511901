"""A decoder of transformers' modelling code with Tandem's attention, products and norms."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.batch.batch import Batch
from tandem.engine.decoder.attention import attend_all
from tandem.engine.decoder.kernel_set import Kernels, StepOptions
from tandem.engine.transformers_models.generic_attention import (
    Angles,
    AttentionCall,
    attend,
    attend_rotated,
    rotary_table,
)
from tandem.engine.transformers_models.generic_parts import (
    keep_frequencies,
    pack_linears,
    swap_experts,
    swap_mlps,
    swap_norms,
)
from tandem.engine.transformers_models.generic_trace import flat_trunk
from tandem.engine.transformers_models.generic_weights import build_generic


class GenericModel:
    """The same face as tandem.engine.decoder.decoder.Model; holds no state between batches."""

    def __init__(
        self, folder: str | Path, config: ModelConfig, kernels: Kernels, device: torch.device
    ) -> None:
        self._config = config
        self.places = config.layer_groups.places
        self.kernels = kernels
        dtype = getattr(torch, config.dtype)
        model, siblings = build_generic(folder, dtype, device)
        self._dtype = kernels.activation_dtype(model.get_input_embeddings().weight)
        pack_linears(model, siblings, kernels)
        if self._dtype != dtype:
            model.to(self._dtype)
        swap_mlps(model, kernels, self._dtype, device)
        swap_norms(model, kernels, self._dtype)
        swap_experts(model, kernels, self._dtype, device)
        keep_frequencies(model, device)
        # The trunk computes hidden states; the rest, with a trunk that passes them on, the logits.
        name, trunk = _trunk_of(model)
        self._trunk = flat_trunk(trunk, config, device)
        model.set_submodule(name, _PassedOn())
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
        none = _Rotation(self._no_rotation, torch.zeros_like(batch.positions))
        step = _Step(self, batch, kv_cache, on_layers, boundaries, none)
        tokens = attend.set(step.attend), attend_rotated.set(step.attend_rotated)
        try:
            positions = batch.positions.clamp(min=0).unsqueeze(0)
            hidden = self._trunk(batch.token_ids.unsqueeze(0), positions)[0]
        finally:
            attend.reset(tokens[0])
            attend_rotated.reset(tokens[1])
        if of_all or batch.samples_all:
            return hidden
        return hidden.index_select(0, batch.logits_indices)

    def step_options(
        self, batch: Batch, rotation: "_Rotation", kv_cache: torch.Tensor, window: int
    ) -> StepOptions:
        """Return the kernels' options of all layers of a step with this rotation and window."""
        return self.kernels.step_options(
            replace(batch, positions=rotation.positions),
            rotation.table,
            kv_cache[:, 0],
            self._config.num_heads,
            window,
        )

    def store(
        self,
        call: AttentionCall,
        qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        rotation: "_Rotation",
        batch: Batch,
        cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        options: StepOptions,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values; return the queries."""
        q = qkv[:, : self._config.num_heads]
        self.kernels.store_qkv(
            qkv,
            call.qk_norm,
            rotation.table,
            rotation.positions,
            batch.slot_mapping,
            cache,
            call.eps,
            q,
            **options.store_qkv,
        )
        return q


class _Rotation(NamedTuple):
    """Angles of a step's tokens."""

    table: torch.Tensor  # [num_angles, 2, head_dim]
    positions: torch.Tensor  # [num_tokens] in the table


@dataclass(slots=True)
class _Step:
    """One pass over one batch: the attention of its layers."""

    model: GenericModel
    batch: Batch
    kv_cache: torch.Tensor  # [num_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
    on_layers: Callable[[int], None] | None
    boundaries: Collection[int]
    no_rotation: _Rotation
    # By the identity of cosines, which are kept with them.
    rotations: dict[int, tuple[_Rotation, Angles]] = field(default_factory=dict)
    # By window, group, and identity of the rotation's table.
    options: dict[tuple[int, int, int], StepOptions] = field(default_factory=dict)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        head_dim, value_size = self.kv_cache.shape[-1], v.shape[-1]
        # Heads of other sizes are padded with zeros, which change no score.
        qkv = torch.cat([_padded(x, head_dim) for x in (q, k, v)], dim=1)
        return self._attend(call, qkv, self.no_rotation)[..., :value_size]

    def attend_rotated(
        self, call: AttentionCall, qkv: torch.Tensor, angles: Angles
    ) -> torch.Tensor:
        key = id(angles[0])
        if key not in self.rotations:
            positions = torch.arange(len(qkv), device=qkv.device)
            self.rotations[key] = _Rotation(rotary_table(angles), positions), angles
        qkv = qkv.view(len(qkv), -1, self.kv_cache.shape[-1])
        return self._attend(call, qkv, self.rotations[key][0])

    def _attend(self, call: AttentionCall, qkv: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
        group, place = self.model.places[call.layer]
        cache, batch = self.kv_cache[:, place], self.batch.of_group(group)
        key = call.window, group, id(rotation.table)
        if key not in self.options:
            self.options[key] = self.model.step_options(batch, rotation, self.kv_cache, call.window)
        options = self.options[key]
        q = self.model.store(call, qkv, rotation, batch, cache, options)
        if self.on_layers is not None and call.layer + 1 in self.boundaries:
            self.on_layers(call.layer + 1)
        kernels = self.model.kernels
        return attend_all(kernels, q, batch, cache, call.scale, call.options, options)


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _trunk_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the part of a causal language model that ends with hidden states, and its name.

    It may be wrapped in others that hold nothing else.
    """
    parts = dict(model.named_children())
    name, trunk = next(each for each in parts.items() if isinstance(each[1], PreTrainedModel))
    inner = list(trunk.named_children())
    while len(inner) == 1 and isinstance(inner[0][1], PreTrainedModel):
        name, trunk = f"{name}.{inner[0][0]}", inner[0][1]
        inner = list(trunk.named_children())
    return name, trunk


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
