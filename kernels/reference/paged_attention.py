"""The PyTorch reference implementation of tandem.kernels.attention.decode."""

from dataclasses import dataclass

import torch

from tandem.kernels.reference.gather import gather_context, record_index
from tandem.kernels.reference.softmax import weights_of

# Sequences are attended to together while padding them to the longest costs less than another
# round of calls, and while what is gathered of them stays in a CPU's cache.
SLACK_TOKENS = 64
LARGEST_GROUP_BYTES = 4 * 2**20


@dataclass(slots=True, frozen=True)
class _Group:
    rows: slice  # of the plan's order
    longest: int
    index: torch.Tensor  # of record_index
    mask: torch.Tensor  # added to scores [num_seqs * num_kv_heads, group_size, longest]: 0 or -inf


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """Indices and masks that the attention of all layers of a step shares."""

    order: torch.Tensor | None  # sequences with a context, by length; None: all, as they stand
    groups: tuple[_Group, ...]


def plan_decode(
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], any layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    context_lens: torch.Tensor,  # [num_seqs]
    group_size: int,
    *,
    window: int = 0,
) -> DecodePlan:
    """Make the `plan` for paged_decode_attention of these sequences, over any layer of the pool.

    `group_size` is the number of query heads per KV head.
    """
    lens: list[int] = context_lens.tolist()
    rows = [row for row, length in enumerate(lens) if length]
    token_bytes = 2 * kv_cache.shape[2] * kv_cache.shape[4] * 4
    sizes = _group_sizes([lens[row] for row in rows], token_bytes)
    order = None
    if len(sizes) > 1 or len(rows) < len(lens):
        rows.sort(key=lens.__getitem__)
        sizes = _group_sizes([lens[row] for row in rows], token_bytes)
        order = torch.tensor(rows, dtype=torch.int64, device=context_lens.device)
        block_tables, context_lens = block_tables[order], context_lens[order]
    if window:
        block_tables = _seen_blocks(block_tables, context_lens, kv_cache.shape[3], window)
    groups, first = [], 0
    for size in sizes:
        mine = slice(first, first + size)
        first = mine.stop
        my_lens = [lens[row] for row in rows[mine]]
        longest = max(my_lens)
        index = record_index(kv_cache, block_tables[mine], longest)
        mask = torch.zeros((1, 1, 1), device=kv_cache.device)
        if window or min(my_lens) < longest:
            mask = _mask(context_lens[mine], longest, kv_cache.shape[2], window)
        groups.append(_Group(mine, longest, index, mask))
    return DecodePlan(order, tuple(groups))


def paged_decode_attention(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    context_lens: torch.Tensor,  # [num_seqs] positions attended, the query's own included
    scale: float,
    out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [num_heads], float32
    plan: DecodePlan | None = None,
) -> None:
    """Let the last token of each sequence attend over its context.

    Unlike the kernel, this multiplies masked values by zero: every block in `block_tables`, padding
    included, must hold finite numbers, but for those before a window, which are not read. Computes
    in float32 whatever the pool's dtype. `plan` is that of `plan_decode` for the same arguments,
    made here if it is None.
    """
    num_kv_heads, head_dim = kv_cache.shape[2], q.shape[2]
    group_size = q.shape[1] // num_kv_heads
    if plan is None:
        plan = plan_decode(kv_cache, block_tables, context_lens, group_size, window=window)
    my_q, my_out = q, out
    if plan.order is not None:
        my_q, my_out = my_q[plan.order], torch.empty_like(my_q[plan.order])
    for group in plan.groups:
        num_seqs = group.rows.stop - group.rows.start
        k, v = gather_context(kv_cache, group.index, num_seqs, group.longest, torch.float32)
        # The query heads of one KV head are the rows of one product: K and V are read once.
        rows = my_q[group.rows].reshape(k.shape[0], group_size, head_dim).float()
        if soft_cap:
            scores = torch.bmm(rows, k.mT).mul_(scale / soft_cap)
            scores = scores.tanh_().mul_(soft_cap).add_(group.mask)
        else:
            scores = torch.baddbmm(group.mask, rows, k.mT, alpha=scale)
        my_sinks = None
        if sinks is not None:
            my_sinks = sinks.view(num_kv_heads, group_size, 1).repeat(num_seqs, 1, 1)
        attended = torch.bmm(weights_of(scores, my_sinks), v)
        my_out[group.rows].copy_(attended.view(num_seqs, -1, head_dim))
    if plan.order is not None:
        out.zero_().index_copy_(0, plan.order, my_out.to(out.dtype))


def _seen_blocks(
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    context_lens: torch.Tensor,  # [num_seqs]
    block_size: int,
    window: int,
) -> torch.Tensor:
    """Return tables in which blocks that are seen stand for those that the window has passed.

    Those, and padding that repeats them, may be other sequences' by now.
    """
    ordinals = torch.arange(block_tables.shape[1], device=block_tables.device)
    first = (context_lens - window).clamp(min=0).unsqueeze(1) // block_size
    last = (context_lens - 1).clamp(min=0).unsqueeze(1) // block_size
    return block_tables.gather(1, torch.minimum(torch.maximum(ordinals, first), last))


def _group_sizes(lens: list[int], token_bytes: int) -> list[int]:
    """Return the sizes of groups of consecutive sequences of these lengths."""
    sizes: list[int] = []
    size = shortest = longest = 0
    for length in lens:
        least, most = min(shortest, length), max(longest, length)
        is_far = most - least > SLACK_TOKENS + least // 4
        if size and (is_far or (size + 1) * most * token_bytes > LARGEST_GROUP_BYTES):
            sizes.append(size)
            size = 0
        shortest, longest = (least, most) if size else (length, length)
        size += 1
    return [*sizes, size] if size else sizes


def _mask(
    context_lens: torch.Tensor,  # [num_seqs]
    longest: int,
    num_kv_heads: int,
    window: int,
) -> torch.Tensor:
    """Return [num_seqs * num_kv_heads, 1, longest]: -inf at positions that are not seen."""
    visible = context_lens.view(-1, 1, 1)
    positions = torch.arange(longest, device=context_lens.device)
    seen = positions < visible
    if window:
        seen &= positions >= visible - window
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
    return mask.repeat_interleave(num_kv_heads, 0)
