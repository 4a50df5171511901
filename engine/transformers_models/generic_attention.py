"""The two functions that transformers' models call in place of their own: attention and experts.

transformers finds both by the name INTERFACE. No mask function has that name, so no mask is built;
one has the name PROBE, under which the same functions are found.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from tandem.engine.decoder.attention import attention_options
from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.transformers_models.generic_masks import PROBE, Rule, rule_of
from tandem.kernels.reference.experts import Experts, ExpertWeights

INTERFACE = "tandem"
_CALL = "_tandem_call"  # a module's attribute: its call, the same in every pass
_PACKED = "_tandem_experts"  # and of experts that Tandem's kernels compute


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention, as its modelling code asks for it."""

    layer: int
    scale: float
    window: int  # positions that a query sees, its own the last; 0: all before it
    options: Mapping[str, Any]  # attention_options, `window` among them
    unsupported: str  # the first argument that no kernel takes, or empty
    rule: Rule | None  # of the mask that the layer gets, in a probe
    # Of a module whose heads are normed and rotated by a kernel:
    qk_norm: torch.Tensor | None = None  # [num_heads + num_kv_heads, head_dim], None: no norm
    eps: float = 1e-6


# (call, q, k, v), each [num_tokens, heads, size] |-> attended [num_tokens, num_heads, v's size]
Attend = Callable[[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each [1, num_tokens, head_dim]

# (call, q, k and v side by side [num_tokens, their sizes], angles) |-> attended, as Attend's
AttendRotated = Callable[[AttentionCall, torch.Tensor, Angles], torch.Tensor]

# The attention of the forward pass that this thread is in.
attend: ContextVar[Attend] = ContextVar("attend")
attend_rotated: ContextVar[AttendRotated] = ContextVar("attend_rotated")


def rotary_table(angles: Angles) -> torch.Tensor:
    """Return [num_tokens, 2, head_dim] as kernels take it: the sine negated in its first half."""
    table = torch.cat(angles).transpose(0, 1).contiguous()
    table[:, 1, : table.shape[2] // 2].neg_()
    return table


def is_attention(module: nn.Module) -> bool:
    """Return whether a pass of the module came to `attend`."""
    return _CALL in module.__dict__


def _attention(
    module: Any,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, size of a value]
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, num_tokens, num_heads, size of a value], by the `attend` of this pass."""
    call = module.__dict__.get(_CALL)
    if call is None or call.layer != module.layer_idx:
        window = _window(module, others.get("sliding_window"))
        sinks = others.get("s_aux", getattr(module, "sinks", None))
        call = module.__dict__[_CALL] = AttentionCall(
            module.layer_idx,
            float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            window,
            attention_options(window, float(others.get("softcap") or 0.0), sinks),
            _unsupported(module, attention_mask, others),
            rule_of(attention_mask),
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend.get()(call, q, k, v).unsqueeze(0), None


def _window(module: Any, sliding_window: int | None) -> int:
    """Return the window that the call names, or that the configuration gives to this layer."""
    kinds = getattr(module.config, "layer_types", None)
    if sliding_window is None and kinds and kinds[module.layer_idx] == "sliding_attention":
        sliding_window = module.config.sliding_window
    return int(sliding_window or 0)


def _unsupported(module: Any, mask: torch.Tensor | None, others: dict[str, Any]) -> str:
    if mask is not None and rule_of(mask) is None:
        return "a mask of its own"
    for name in ("position_bias", "attention_bias", "head_mask", "indices"):
        if others.get(name) is not None:
            return name
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "attention that is not causal"
    return ""


def _experts(
    module: Any,
    hidden: torch.Tensor,  # [num_tokens, hidden_size]
    top_k_index: torch.Tensor,  # [num_tokens, top_k]
    top_k_weights: torch.Tensor,  # [num_tokens, top_k]
) -> torch.Tensor:
    """Return the weighted sum of each token's experts: one product per expert that is used."""
    if hidden.is_meta:
        return torch.empty_like(hidden)
    packed: Experts | None = module.__dict__.get(_PACKED)
    if packed is not None:
        ids, weights = top_k_index.to(torch.int32), top_k_weights.to(torch.float32)
        return packed(hidden.contiguous(), ids.contiguous(), weights.contiguous())
    if hidden.is_cuda:
        if multiplies_groups(hidden.device, hidden.dtype):
            grouped: torch.Tensor = grouped_mm_experts_forward(
                module, hidden, top_k_index, top_k_weights
            )
            return grouped
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("tokens are counted by expert on the host")
    num_tokens, top_k = top_k_index.shape
    expert_of = top_k_index.flatten()
    order = expert_of.argsort(stable=True)
    counts = torch.bincount(expert_of, minlength=module.down_proj.shape[0]).tolist()
    out = hidden.new_empty(num_tokens * top_k, hidden.shape[1])
    for expert, rows in enumerate(torch.split(order, counts)):
        if len(rows):
            out[rows] = _expert(module, expert, hidden[rows // top_k])
    return (out.view(num_tokens, top_k, -1) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def multiplies_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies tokens by their experts without a look at the counts.

    A graph cannot take a look; other chips than these, and other dtypes, copy counts to the host.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def pack_experts(module: Any, kernels: Kernels) -> bool:
    """Let kernels compute these experts of the INTERFACE; return whether they can.

    They take gates beside ups, opened by SiLU, and weights stored by output.
    """
    if not module.has_gate or module.is_transposed or module.has_post_expert_norm:
        return False
    width = module.down_proj.shape[2]
    gate_up = torch.linspace(-100, 100, 2 * width, device=module.down_proj.device).view(1, -1)
    gate, up = gate_up.chunk(2, dim=-1)
    if not torch.allclose(module._apply_gate(gate_up), F.silu(gate) * up):
        return False
    weights = ExpertWeights(
        module.gate_up_proj.data,
        module.down_proj.data,
        module.gate_up_proj_bias.data if module.has_bias else None,
        module.down_proj_bias.data if module.has_bias else None,
    )
    module.__dict__[_PACKED] = kernels.pack_experts(weights)
    return True


def _expert(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)[expert]
        bias = getattr(module, name + "_bias")[expert] if module.has_bias else None
        return F.linear(x, weight.T if module.is_transposed else weight, bias)

    if module.has_gate:
        inner = module._apply_gate(product(x, "gate_up_proj"))
    else:
        inner = module.act_fn(product(x, "up_proj"))
    y = product(inner, "down_proj")
    return module.post_expert_norm(y) if module.has_post_expert_norm else y


AttentionInterface.register(INTERFACE, _attention)
AttentionInterface.register(PROBE, _attention)
ExpertsInterface.register(INTERFACE, _experts)
