"""Attention modules of transformers whose heads one kernel can norm, rotate and store.

A module is compared with its replacement in float32, with stand-ins for its products: its weights
and their dtype have no say.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tandem.engine.transformers_models.generic_attention import (
    Angles,
    AttentionCall,
    attend,
    attend_rotated,
    rotary_table,
)
from tandem.engine.transformers_models.generic_parts import Norm, PackedLinear, Part
from tandem.kernels.reference.kv_store import store_qkv
from tandem.kernels.reference.norm import inverse_rms

logger = logging.getLogger(__name__)

_BOUND = 1e-5  # of differences, relative and absolute


class _Attention:
    """A product; norms and rotation of heads, and the store; attention; a product."""

    def __init__(
        self, call: AttentionCall, inputs: Sequence[PackedLinear], output: PackedLinear
    ) -> None:
        self._call = call
        self._products, self._bias = inputs[0].products, _side_by_side(inputs)
        self._output, self._output_bias = output.products, output.bias

    def forward(
        self, hidden_states: torch.Tensor, *_: object, position_embeddings: Angles, **__: object
    ) -> tuple[torch.Tensor, None]:
        qkv = self._products.all(hidden_states[0])
        if self._bias is not None:
            qkv.add_(self._bias)
        attended = attend_rotated.get()(self._call, qkv, position_embeddings)
        y = self._output.all(attended.flatten(1))
        if self._output_bias is not None:
            y.add_(self._output_bias)
        return y.unsqueeze(0), None


def _side_by_side(linears: Sequence[PackedLinear]) -> torch.Tensor | None:
    """Return the biases of linear modules, zeros for those that have none beside others."""
    biases = [each.bias for each in linears if each.bias is not None]
    zeros = (biases[0].new_zeros(each.out_features) for each in linears if biases)
    pairs = list(zip(linears, zeros, strict=False))
    return torch.cat([zero if x.bias is None else x.bias for x, zero in pairs]) if pairs else None


class _StandIn(Part):
    """A function in place of a module; its calls are noted."""

    def __init__(self, name: str, calls: list[str], function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._name, self._calls, self._function = name, calls, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls.append(self._name)
        return self._function(x)


def fuse_heads(calls: dict[nn.Module, dict[str, Any]], head_dim: int) -> None:
    """Let attention modules, with their arguments in a pass, compute as above where they do it."""
    for module, named in calls.items():
        try:
            module.__dict__["forward"] = _fused(module, named, head_dim).forward
        except Exception as error:  # of modelling code that does not get what it needs
            logger.debug("%s stays as it is: %r", type(module).__name__, error)


def _fused(module: nn.Module, named: dict[str, Any], head_dim: int) -> _Attention:
    """Return the replacement of an attention module. Raises any exception if there is none."""
    parts: dict[str, Any] = {
        n: part for n, part in module.named_modules() if isinstance(part, Part)
    }
    names: list[str] = []  # in the order of calls
    stand_ins = {name: _StandIn(name, names, _like(part)) for name, part in parts.items()}
    captured: list[tuple[Any, ...]] = []

    def capture(*arguments: Any) -> Any:
        captured.append((*arguments, torch.rand_like(arguments[1])))
        return captured[-1][-1]

    x = torch.rand_like(named["hidden_states"], dtype=torch.float32)
    cos, sin = (each.float() for each in named["position_embeddings"])
    # No other tensor may count: in its place stands an object that nothing computes with.
    plain = bool | int | float | str | None
    rest = {name: each if isinstance(each, plain) else object() for name, each in named.items()}
    rest |= {"hidden_states": x, "position_embeddings": (cos, sin)}
    token = attend.set(capture)
    try:
        for name, stand_in in stand_ins.items():
            module.set_submodule(name, stand_in)
        result, weights = module(**rest)
    finally:
        attend.reset(token)
        for name, part in parts.items():
            module.set_submodule(name, part)
    ((call, q, k, v, attended),) = captured
    called = [parts[name] for name in names]
    *inputs, output = (name for name in names if isinstance(parts[name], PackedLinear))
    inputs.sort(key=lambda name: parts[name].index)
    linears = [parts[name] for name in inputs]
    call = _normed(call, [part for part in called if isinstance(part, Norm)], q, k)
    qkv = torch.cat([stand_ins[name](x[0]) for name in inputs], -1)
    qkv = qkv.view(len(qkv), q.shape[1] + 2 * k.shape[1], head_dim)
    mine = _stored(call, qkv, k.shape[1], (cos, sin))
    my_result = stand_ins[output](attended.reshape(1, len(qkv), -1))
    if (
        len(called) != len(parts)  # each is called once
        or any(each.products is not linears[0].products for each in linears)
        or [len(linears), 1] != [len(parts[n].products.sizes) for n in (inputs[0], output)]
        or weights is not None
        or not all(map(_are_close, (*mine, my_result), (q, k, v, result)))
    ):
        raise ValueError("it computes something else")
    return _Attention(call, linears, parts[output])


def _like(part: Part) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of vectors of a part's sizes; in place of a norm, the norm in float32."""
    if isinstance(part, Norm):
        return lambda x: x * inverse_rms(x, part.eps) * part.weight
    if not isinstance(part, PackedLinear):
        raise ValueError(f"it has a {type(part).__name__}")
    scale, shift = torch.rand(2, part.out_features)
    return lambda x: x.mean(-1, keepdim=True) * scale.to(x.device) + shift.to(x.device)


def _normed(
    call: AttentionCall,
    norms: Sequence[Norm],
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
) -> AttentionCall:
    """Return the call with the norms of query and key heads, if there are norms."""
    if not norms:
        return call
    of_q, of_k = norms
    if of_q.eps != of_k.eps:
        raise ValueError("its norms differ")
    weights = of_q.weight.expand(q.shape[1:]), of_k.weight.expand(k.shape[1:])
    return replace(call, qk_norm=torch.cat(weights), eps=of_q.eps)


def _stored(
    call: AttentionCall,
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    num_kv_heads: int,
    angles: Angles,
) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values, each [num_tokens, heads, head_dim], as they are stored."""
    num_tokens, _, head_dim = qkv.shape
    slots = torch.arange(num_tokens, device=qkv.device)
    cache = qkv.new_empty(1, 2, num_kv_heads, num_tokens, head_dim)
    q = qkv[:, : -2 * num_kv_heads]
    store_qkv(qkv, call.qk_norm, rotary_table(angles), slots, slots, cache, call.eps, q)
    return q, *cache[0].transpose(1, 2)


def _are_close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=_BOUND, atol=_BOUND)
