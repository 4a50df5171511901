"""The PyTorch twin of tandem.kernels.prefill_attention."""

import torch
import torch.nn.functional as F

from tandem.kernels.reference.gather import gather_context


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
    config: object = None,
) -> None:
    """A run of query tokens per sequence attends causally over the cache, itself included.

    The last query of a sequence sits at position context_len - 1. The keys and values of the
    queries must be stored already. With a window a query at position p sees (p - window, p];
    soft_cap c turns a score s, after the scale, into c * tanh(s / c).
    """
    starts: list[int] = cu_seqlens_q.tolist()
    lens: list[int] = context_lens.tolist()
    group_size = q.shape[1] // kv_cache.shape[2]
    for row, context_len in enumerate(lens):
        my_queries = slice(starts[row], starts[row + 1])
        query_len = my_queries.stop - my_queries.start
        if query_len == 0:
            continue
        k, v = gather_context(kv_cache, block_tables[row : row + 1], context_len)
        my_q = q[my_queries].transpose(0, 1).unsqueeze(0)
        is_square = query_len == context_len > 1 and not window
        seen = None
        if soft_cap or window or (1 < query_len < context_len):
            seen = _seen(query_len, context_len, window, q.device)
        if soft_cap:
            attended = _capped(my_q, k, v, seen, scale, soft_cap)
        else:
            attended = F.scaled_dot_product_attention(
                my_q,
                k,
                v,
                attn_mask=seen,
                is_causal=is_square,
                scale=scale,
                enable_gqa=group_size > 1,
            )
        out[my_queries] = attended[0].transpose(0, 1)


def _seen(query_len: int, context_len: int, window: int, device: torch.device) -> torch.Tensor:
    """[query_len, context_len] which positions each query sees."""
    seen = torch.ones(query_len, context_len, dtype=torch.bool, device=device)
    seen = seen.tril_(context_len - query_len)
    return seen.triu_(context_len - query_len - window + 1) if window else seen


def _capped(
    q: torch.Tensor,  # [1, num_heads, query_len, head_dim]
    k: torch.Tensor,  # [1, num_kv_heads, context_len, head_dim]
    v: torch.Tensor,
    seen: torch.Tensor | None,  # [query_len, context_len]
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    scores = (q @ k.mT).float() * (scale / soft_cap)
    scores = scores.tanh_() * soft_cap
    if seen is not None:
        scores = scores.masked_fill_(~seen, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v
