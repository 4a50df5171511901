"""The choice of experts by a router's logits, a token per program."""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor


@triton.jit  # type: ignore[untyped-decorator]
def route_kernel(  # type: ignore[no-untyped-def]
    logits,  # [num_tokens, num_experts]
    correction,  # [num_experts]
    expert_ids,  # [num_tokens, num_chosen]
    weights,  # [num_tokens, num_chosen]
    logits_stride,
    scale,
    least_sum,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    num_groups: tl.constexpr,
    num_open_groups: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    # grid: (num_tokens,)
    wait_for_predecessor()
    my_token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_expert = experts < num_experts
    x = tl.load(logits + my_token * logits_stride + experts, mask=is_expert, other=float("-inf"))
    x = x.to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
        choice = scores
    else:
        scores = tl.exp(x - tl.max(x, 0))
        choice = x
    divisor = tl.sum(scores, 0)
    if HAS_CORRECTION:
        choice += tl.load(correction + experts, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if num_open_groups < num_groups:
        choice = _open_groups(
            choice, experts, num_experts // num_groups, num_groups, num_open_groups
        )
    ranks = tl.arange(0, BLOCK_CHOSEN)
    my_ids = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    my_weights = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for rank in tl.static_range(num_chosen):
        best = tl.minimum(tl.argmax(choice, 0), num_experts - 1)
        score = tl.sum(tl.where(experts == best, scores, 0.0), 0)
        my_ids = tl.where(ranks == rank, best, my_ids)
        my_weights = tl.where(ranks == rank, score, my_weights)
        choice = tl.where(experts == best, float("-inf"), choice)
    if IS_RENORMALIZED:
        divisor = tl.sum(my_weights, 0) + least_sum
    elif IS_SIGMOID:
        divisor = 1.0
    my_places = my_token * num_chosen + ranks
    tl.store(expert_ids + my_places, my_ids, mask=ranks < num_chosen)
    tl.store(weights + my_places, my_weights / divisor * scale, mask=ranks < num_chosen)


@triton.jit  # type: ignore[untyped-decorator]
def _open_groups(  # type: ignore[no-untyped-def]
    choice, experts, size: tl.constexpr, num_groups: tl.constexpr, num_open_groups: tl.constexpr
):
    # Only the groups with the largest sums of their two best remain.
    groups = experts // size
    sums = tl.full(choice.shape, float("-inf"), tl.float32)
    for group in tl.static_range(num_groups):
        mine = tl.where(groups == group, choice, float("-inf"))
        total = tl.max(mine, 0)
        if size > 1:
            total += tl.max(tl.where(experts == tl.argmax(mine, 0), float("-inf"), mine), 0)
        sums = tl.where(groups == group, total, sums)
    is_open = groups < 0
    for _ in tl.static_range(num_open_groups):
        best = tl.argmax(sums, 0) // size
        is_open = is_open | (groups == best)
        sums = tl.where(groups == best, float("-inf"), sums)
    return tl.where(is_open, choice, float("-inf"))
