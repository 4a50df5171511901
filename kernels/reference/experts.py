"""Mixtures of experts: the choice of experts for each token, and the sum of their results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tandem.kernels.reference.linear import Linear, pack_linear
from tandem.kernels.reference.quantized import Matrix
from tandem.kernels.reference.routing import Routing

# x [num_tokens, hidden_size], expert_ids and weights [num_tokens, num_chosen] |-> as x
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

LEAST_SUM = 1e-20  # keeps weights finite whose scores are all 0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The stacked experts of a layer. Each is a gated feed-forward layer, gates first.

    A `limit` opens gates by x * sigmoid(alpha * x) up to it, and adds 1 to `up` within +-limit.
    """

    gate_up: Matrix  # [num_experts, 2 * width, hidden_size]
    down: Matrix  # [num_experts, hidden_size, width]
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * width]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden_size]
    alpha: float = 1.0
    limit: float = 0.0  # 0: silu(gate) * up


def route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    correction: torch.Tensor | None,  # [num_experts] float32, added to sigmoids for the choice
    routing: Routing,
    expert_ids: torch.Tensor,  # [num_tokens, num_chosen] int32
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32
) -> None:
    """Fill expert_ids, the best first, and weights; of equal scores the first expert's is best."""
    logits = logits.float()
    scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(1)
    choice = scores if correction is None else scores + correction
    if routing.num_open_groups < routing.num_groups:
        groups = choice.view(len(choice), routing.num_groups, choice.shape[1] // routing.num_groups)
        best_two = groups.topk(min(2, groups.shape[2]), 2).values.sum(2)
        closed = best_two.sort(dim=1, descending=True, stable=True).indices[
            :, routing.num_open_groups :
        ]
        groups = groups.scatter(1, closed[:, :, None].expand(-1, -1, groups.shape[2]), -torch.inf)
        choice = groups.flatten(1)
    # By logits, of which softmax makes equal ones where they are far below the largest.
    ranked = choice if routing.is_sigmoid else logits
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_chosen]
    expert_ids.copy_(chosen)
    values = scores.gather(1, chosen)
    if routing.is_renormalized:
        values = values / (values.sum(1, keepdim=True) + LEAST_SUM)
    weights.copy_(values * routing.scale)


def pack_experts(experts: ExpertWeights) -> Experts:
    """Return the weighted sum of the chosen experts' results for x in activation_dtype()."""
    gate_up, down = (
        [pack_linear(each) for each in part.unbind()] for part in (experts.gate_up, experts.down)
    )
    return partial(compute_experts, experts=experts, gate_up=gate_up, down=down)


def compute_experts(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    expert_ids: torch.Tensor,  # [num_tokens, num_chosen] int32
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32
    experts: ExpertWeights,
    gate_up: list[Linear],
    down: list[Linear],
) -> torch.Tensor:
    """Compute expert after expert; each token's results are summed in the order of its choice."""
    results = x.new_empty(*expert_ids.shape, x.shape[1], dtype=torch.float32)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        tokens, ranks = (expert_ids == expert).nonzero(as_tuple=True)
        hidden = gate_up[expert](x[tokens])
        if experts.gate_up_bias is not None:
            hidden += experts.gate_up_bias[expert]
        result = down[expert](_open(hidden, experts)).float()
        if experts.down_bias is not None:
            result += experts.down_bias[expert]
        results[tokens, ranks] = result * weights[tokens, ranks, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(expert_ids.shape[1]):
        out += results[:, rank]
    return out.to(x.dtype)


def _open(hidden: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    gate, up = hidden.float().chunk(2, 1)
    if experts.limit:
        gate = gate.clamp(max=experts.limit)
        up = up.clamp(-experts.limit, experts.limit) + 1.0
    return (gate * (experts.alpha * gate).sigmoid() * up).to(hidden.dtype)
