"""The PyTorch reference implementation of tandem.kernels.attention.prefill."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.kernels.reference.gather import gather_context, record_index
from tandem.kernels.reference.softmax import weights_of

# A run of queries is computed in parts: each part leaves out the keys after its last query.
PART_TOKENS = 64


@dataclass(slots=True, frozen=True)
class _Run:
    """One sequence's queries."""

    start: int  # the first one's token
    query_len: int
    context_len: int  # without blocks that the window has passed
    index: torch.Tensor  # of record_index


@dataclass(slots=True, frozen=True)
class PrefillPlan:
    """Indices and masks that the attention of all layers of a step shares."""

    runs: tuple[_Run, ...]
    # [PART_TOKENS, longest + PART_TOKENS] 0 or -inf: column `longest` is row 0's own position
    mask: torch.Tensor
    longest: int  # positions before any part's first query, at most


def plan_prefill(
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], any layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    cu_seqlens_q: torch.Tensor,  # [num_seqs + 1]
    context_lens: torch.Tensor,  # [num_seqs]
    *,
    window: int = 0,
) -> PrefillPlan:
    """Make the `plan` for prefill_attention of these sequences, over any layer of the pool."""
    starts: list[int] = cu_seqlens_q.tolist()
    block_size = kv_cache.shape[3]
    runs: list[_Run] = []
    for row, context_len in enumerate(context_lens.tolist()):
        query_len = starts[row + 1] - starts[row]
        if query_len:
            # Positions count from the first block that the window does not pass.
            num_passed = max(0, context_len - query_len + 1 - window) // block_size if window else 0
            context_len -= num_passed * block_size
            index = record_index(kv_cache, block_tables[row : row + 1, num_passed:], context_len)
            runs.append(_Run(starts[row], query_len, context_len, index))
    longest = max((run.context_len for run in runs), default=0)
    queries = torch.arange(PART_TOKENS, device=kv_cache.device).unsqueeze(1)
    ahead = torch.arange(-longest, PART_TOKENS, device=kv_cache.device) - queries
    hidden = ahead > 0
    if window:
        hidden |= ahead <= -window
    mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return PrefillPlan(tuple(runs), mask, longest)


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], sequences one after another
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    cu_seqlens_q: torch.Tensor,  # [num_seqs + 1] seq |-> its first token in q
    context_lens: torch.Tensor,  # [num_seqs] positions attended by a sequence's last query
    max_query_len: int,
    scale: float,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [num_heads], float32
    plan: PrefillPlan | None = None,
) -> None:
    """Let a run of query tokens per sequence attend causally over the cache, itself included.

    The last query of a sequence sits at position context_len - 1. The keys and values of the
    queries must be stored already. With a window a query at position p sees (p - window, p];
    soft_cap c turns a score s, after the scale, into c * tanh(s / c). Computes in float32 whatever
    the pool's dtype. `plan` is that of `plan_prefill` for the same arguments, made here if None.
    """
    if plan is None:
        plan = plan_prefill(kv_cache, block_tables, cu_seqlens_q, context_lens, window=window)
    for run in plan.runs:
        k, v = gather_context(kv_cache, run.index, 1, run.context_len, torch.float32)
        first = run.context_len - run.query_len
        for begin in range(0, run.query_len, PART_TOKENS):
            end = min(begin + PART_TOKENS, run.query_len)
            my_queries = slice(run.start + begin, run.start + end)
            num_seen = first + end
            columns = slice(plan.longest - first - begin, plan.longest + end - begin)
            attended = _attend(
                q[my_queries].transpose(0, 1).float(),
                k[:, :num_seen],
                v[:, :num_seen],
                plan.mask[: end - begin, columns],
                scale,
                soft_cap,
                sinks,
            )
            out[my_queries] = attended.transpose(0, 1)


def _attend(
    q: torch.Tensor,  # [num_heads, num_queries, head_dim]
    k: torch.Tensor,  # [num_kv_heads, num_seen, head_dim]
    v: torch.Tensor,
    mask: torch.Tensor,  # [num_queries, num_seen]
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,  # [num_heads]
) -> torch.Tensor:
    if not soft_cap and sinks is None:
        batched = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        is_grouped = q.shape[0] > k.shape[0]
        return F.scaled_dot_product_attention(
            *batched, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )[0]
    group_size = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group_size, 0), v.repeat_interleave(group_size, 0)
    scores = torch.bmm(q, k.mT).mul_(scale)
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    my_sinks = None if sinks is None else sinks.view(-1, 1, 1)
    return torch.bmm(weights_of(scores.add_(mask), my_sinks), v)
