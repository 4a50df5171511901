"""The PyTorch twin of tandem.kernels.attention.decode."""

from dataclasses import dataclass

import torch

from tandem.kernels.reference.gather import gather_context, record_index

# Sequences are attended to together while padding them to the longest costs less than another
# round of calls, and while what is gathered of them stays in a CPU's cache.
SLACK_TOKENS = 64
LARGEST_GROUP_BYTES = 4 * 2**20


@dataclass(slots=True, frozen=True)
class _Group:
    rows: slice  # of the plan's order
    longest: int
    index: torch.Tensor  # of record_index
    mask: torch.Tensor  # added to [num_seqs * num_kv_heads, queries, longest]: 0 or -inf


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """What every layer's attention of one step has in common."""

    order: torch.Tensor | None  # sequences with a context, by length; None: all, as they stand
    groups: tuple[_Group, ...]


def plan_decode(
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], any layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    context_lens: torch.Tensor,  # [num_seqs]
    group_size: int,
    *,
    queries_per_seq: int = 1,
    window: int = 0,
) -> DecodePlan:
    """The `plan` for paged_decode_attention of these sequences, over any layer of the pool.

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
    groups, first = [], 0
    for size in sizes:
        mine = slice(first, first + size)
        first = mine.stop
        my_lens = [lens[row] for row in rows[mine]]
        longest = max(my_lens)
        index = record_index(kv_cache, block_tables[mine], longest)
        mask = torch.zeros((1, 1, 1), device=kv_cache.device)
        if queries_per_seq > 1 or window or min(my_lens) < longest:
            heads = kv_cache.shape[2], queries_per_seq, group_size
            mask = _mask(context_lens[mine], longest, heads, window)
        groups.append(_Group(mine, longest, index, mask))
    return DecodePlan(order, tuple(groups))


def paged_decode_attention(
    q: torch.Tensor,  # [num_seqs * queries_per_seq, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    context_lens: torch.Tensor,  # [num_seqs] positions attended, the queries' own included
    scale: float,
    out: torch.Tensor,  # [num_seqs * queries_per_seq, num_heads, head_dim]
    *,
    queries_per_seq: int = 1,
    soft_cap: float = 0.0,
    window: int = 0,
    plan: DecodePlan | None = None,
) -> None:
    """The last `queries_per_seq` tokens of each sequence attend causally over its context.

    Unlike the kernel, the twin multiplies what it masks by zero: every block named in
    `block_tables`, padding included, must hold finite numbers. Computes in float32 whatever the
    pool's dtype. `plan` is plan_decode's of the same arguments, made here if there is none.
    """
    num_kv_heads, head_dim = kv_cache.shape[2], q.shape[2]
    group_size = q.shape[1] // num_kv_heads
    if plan is None:
        options = {"queries_per_seq": queries_per_seq, "window": window}
        plan = plan_decode(kv_cache, block_tables, context_lens, group_size, **options)
    # The queries and heads of one KV head stand as rows of one query: K and V are read once.
    packed = (-1, queries_per_seq, num_kv_heads, group_size, head_dim)
    my_q, my_out = q.view(packed), out.view(packed)
    if plan.order is not None:
        my_q, my_out = my_q[plan.order], torch.empty_like(my_q[plan.order])
    for group in plan.groups:
        num_seqs = group.rows.stop - group.rows.start
        k, v = gather_context(kv_cache, group.index, num_seqs, group.longest, torch.float32)
        rows = my_q[group.rows].transpose(1, 2).reshape(k.shape[0], -1, head_dim).float()
        if soft_cap:
            scores = torch.bmm(rows, k.mT).mul_(scale / soft_cap)
            scores = scores.tanh_().mul_(soft_cap).add_(group.mask)
        else:
            scores = torch.baddbmm(group.mask, rows, k.mT, alpha=scale)
        attended = torch.bmm(scores.softmax(-1), v)
        by_head = (num_seqs, num_kv_heads, queries_per_seq, group_size, head_dim)
        my_out[group.rows].copy_(attended.view(by_head).transpose(1, 2))
    if plan.order is not None:
        out.view(packed).zero_().index_copy_(0, plan.order, my_out.to(out.dtype))


def _group_sizes(lens: list[int], token_bytes: int) -> list[int]:
    """How many sequences of these lengths, one after another, make up each group."""
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
    heads: tuple[int, int, int],  # KV heads, queries per sequence, query heads per KV head
    window: int,
) -> torch.Tensor:
    """[num_seqs * num_kv_heads, queries, longest]: -inf where a query does not see."""
    num_kv_heads, queries_per_seq, group_size = heads
    tokens = torch.arange(1 - queries_per_seq, 1, device=context_lens.device)
    visible = (context_lens.view(-1, 1) + tokens).unsqueeze(2)
    positions = torch.arange(longest, device=context_lens.device)
    seen = positions < visible
    if window:
        seen &= positions >= visible - window
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
    if queries_per_seq > 1:
        mask = mask.repeat_interleave(group_size, 1)
    return mask.repeat_interleave(num_kv_heads, 0)
