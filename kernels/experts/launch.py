"""Mixtures of experts: the choice of experts for each token, and the sum of their results."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from tandem.kernels.dependent_launch import launch_options
from tandem.kernels.experts.products import combine_kernel, down_kernel, gate_up_kernel
from tandem.kernels.experts.route import route_kernel
from tandem.kernels.linear.codes import form_of, step_size, stored_parts, weight_bits
from tandem.kernels.reference.experts import LEAST_SUM, Experts, ExpertWeights
from tandem.kernels.reference.routing import Routing
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import architecture, tuned_config

COMBINE_WIDTH = 1024
NARROW_FROM = 100  # the architecture on which gates and ups of FP8 would spill in a tile of 64
LARGE_TILE = 128  # choices; where experts have as many on average


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A program's tile of choices by columns, and the inputs of one step."""

    block_m: int
    block_n: int
    block_k: int  # the order of a row's sums depends on it alone
    num_warps: int
    num_stages: int


def default_config(element_bytes: int, has_codes: bool) -> ExpertsConfig:
    """Return the tiles for few choices of an expert.

    A tile that is not full loads no rows that it lacks, and costs no time while it waits for
    weights: with 64 rows there are 64 operations for each byte of them. Numbers of codes take
    registers, which more warps have.
    """
    if element_bytes == 4:
        return ExpertsConfig(16, 32, 32, 4, 2)
    return ExpertsConfig(64, 64, 64, 8 if has_codes else 4, 3)


def large_config(config: ExpertsConfig, *, has_codes: bool, is_paired: bool) -> ExpertsConfig:
    """Return the tiles for many choices of an expert, which sum in the same order."""
    # Each loads what a tile of 128 by 128 does, or of 128 by 64 of codes, which take registers.
    block_n = (64 if has_codes else 128) // (1 + is_paired)
    return replace(config, block_m=LARGE_TILE, block_n=block_n, num_warps=8, num_stages=3)


def route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    correction: torch.Tensor | None,  # [num_experts] float32, added to sigmoids for the choice
    routing: Routing,
    expert_ids: torch.Tensor,  # [num_tokens, num_chosen] int32
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32
) -> None:
    """Fill expert_ids, the best first, and weights; of equal scores the first expert's is best."""
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    assert expert_ids.shape == weights.shape == (num_tokens, routing.num_chosen)
    assert logits.stride(1) == 1 and expert_ids.is_contiguous() and weights.is_contiguous()
    route_kernel[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        expert_ids,
        weights,
        logits.stride(0),
        routing.scale,
        LEAST_SUM,
        num_experts=num_experts,
        num_chosen=routing.num_chosen,
        num_groups=routing.num_groups,
        num_open_groups=routing.num_open_groups,
        IS_SIGMOID=routing.is_sigmoid,
        IS_RENORMALIZED=routing.is_renormalized,
        HAS_CORRECTION=correction is not None,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        BLOCK_CHOSEN=next_power_of_2(routing.num_chosen),
        num_warps=1,
        **launch_options(),
    )


def pack_experts(experts: ExpertWeights) -> Experts:
    """Return the weighted sum of the chosen experts' results, over the weights as they are."""
    return partial(_compute, experts=experts)


def pack_experts_in_float32(experts: ExpertWeights) -> Experts:
    """Return pack_experts without a rounding of the sums to the dtype of x."""
    return partial(_compute, experts=experts, out_dtype=torch.float32)


def _compute(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    expert_ids: torch.Tensor,  # [num_tokens, num_chosen] int32
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32
    experts: ExpertWeights,
    out_dtype: torch.dtype | None = None,  # None: that of x
) -> torch.Tensor:
    (num_tokens, hidden_size), num_chosen = x.shape, expert_ids.shape[1]
    out = torch.empty((num_tokens, hidden_size), dtype=out_dtype or x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    assert x.stride(1) == 1 and expert_ids.is_contiguous() and weights.is_contiguous()
    combine_kernel[(num_tokens, cdiv(hidden_size, COMBINE_WIDTH))](
        _results(x, expert_ids, weights, experts),
        out,
        hidden_size=hidden_size,
        num_chosen=num_chosen,
        BLOCK_WIDTH=COMBINE_WIDTH,
        num_warps=4,
        **launch_options(),
    )
    return out


def _results(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Return the weighted result of each choice, [num_tokens * num_chosen, hidden_size] float32."""
    num_experts, hidden_size, width = experts.down.shape
    num_choices = expert_ids.numel()
    order, starts = _by_expert(expert_ids, num_experts)
    opened = torch.empty((num_choices, width), dtype=x.dtype, device=x.device)
    results = torch.empty((num_choices, hidden_size), dtype=torch.float32, device=x.device)
    opening, closing = _configs_for(experts, num_choices, x.element_size())
    most_tiles = num_choices // opening.block_m + min(num_experts, num_choices)
    shared = {
        "hidden_size": hidden_size,
        "width": width,
        "num_experts": num_experts,
        "BLOCK_EXPERTS": next_power_of_2(num_experts),
        "BLOCK_M": opening.block_m,
        "num_warps": opening.num_warps,
        "num_stages": opening.num_stages,
        **launch_options(),
    }
    gate_up_kernel[(cdiv(width, opening.block_n), most_tiles)](
        x,
        order,
        starts,
        *stored_parts(experts.gate_up),
        x if experts.gate_up_bias is None else experts.gate_up_bias,
        opened,
        x.stride(0),
        experts.alpha,
        experts.limit,
        num_chosen=expert_ids.shape[1],
        FORM=form_of(experts.gate_up),
        HAS_BIAS=experts.gate_up_bias is not None,
        IS_CLAMPED=experts.limit > 0,
        BLOCK_N=opening.block_n,
        BLOCK_K=step_size(experts.gate_up, opening.block_k),
        **shared,
    )
    down_kernel[(cdiv(hidden_size, closing.block_n), most_tiles)](
        opened,
        order,
        starts,
        *stored_parts(experts.down),
        x if experts.down_bias is None else experts.down_bias,
        weights,
        results,
        FORM=form_of(experts.down),
        HAS_BIAS=experts.down_bias is not None,
        BLOCK_N=closing.block_n,
        BLOCK_K=step_size(experts.down, closing.block_k),
        **shared,
    )
    return results


def _by_expert(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choices in the order of their experts, and where those of each expert start."""
    ordered, order = expert_ids.view(-1).sort(stable=True)
    each = torch.arange(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    return order, torch.searchsorted(ordered, each)


def _configs_for(
    experts: ExpertWeights, num_choices: int, element_bytes: int
) -> tuple[ExpertsConfig, ExpertsConfig]:
    """Return the configurations of gates and ups, and of the way back, on this chip."""
    bits = weight_bits(experts.gate_up)
    num_experts, hidden_size, width = experts.down.shape
    has_codes = bits < 8 * element_bytes
    default = default_config(element_bytes, has_codes=has_codes)
    if bits == 8 and architecture() >= NARROW_FROM:
        default = replace(default, block_n=32)
    shape = {"hidden_size": hidden_size, "width": width, "bits": bits}
    config = tuned_config(default, "experts", **shape, element_bytes=element_bytes)
    if element_bytes == 4 or num_choices < num_experts * LARGE_TILE:
        return config, config
    large = partial(large_config, config, has_codes=has_codes)
    return large(is_paired=True), large(is_paired=False)
