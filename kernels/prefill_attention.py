"""Prefill attention: runs of query tokens over their paged context, causal, of any lengths."""

import torch
import triton
import triton.language as tl

TILE_ROWS = 64  # (query token, query head of the group) pairs per program
TILE_TOKENS = 64  # context positions per step of the online softmax
MIN_DOT_ROWS = 16  # tl.dot takes no tile with fewer rows


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], sequences one after another
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    cu_seqlens_q: torch.Tensor,  # [num_seqs + 1] seq |-> its first token in q
    context_lens: torch.Tensor,  # [num_seqs] positions attended by a sequence's last query
    max_query_len: int,
    scale: float,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
) -> None:
    """A run of query tokens per sequence attends causally over the cache, itself included.

    The last query of a sequence sits at position context_len - 1. The keys and values of the
    queries must be stored already; slots past a sequence's context are never read.
    """
    num_seqs, max_rows = context_lens.shape[0], max_query_len * (q.shape[1] // kv_cache.shape[2])
    if num_seqs == 0 or max_rows == 0:
        return
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    assert q.dtype == kv_cache.dtype == out.dtype
    assert num_heads % num_kv_heads == 0 and kv_cache.shape[4] == head_dim
    assert q.stride(2) == out.stride(2) == kv_cache.stride(4) == 1
    assert block_tables.stride(1) == cu_seqlens_q.stride(0) == context_lens.stride(0) == 1
    _prefill_kernel[(triton.cdiv(max_rows, TILE_ROWS), num_kv_heads, num_seqs)](
        q,
        kv_cache,
        block_tables,
        cu_seqlens_q,
        context_lens,
        out,
        scale,
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        block_tables.stride(0),
        *out.stride()[:2],
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=TILE_TOKENS,
        BLOCK_D=max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_tokens, num_heads, head_dim]
    kv_cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables,  # [num_seqs, max_blocks]
    cu_seqlens_q,  # [num_seqs + 1]
    context_lens,  # [num_seqs]
    out,  # [num_tokens, num_heads, head_dim]
    scale,
    q_stride_token,
    q_stride_head,
    cache_stride_block,
    cache_stride_kv,
    cache_stride_head,
    cache_stride_slot,
    tables_stride_seq,
    out_stride_token,
    out_stride_head,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (cdiv(max_query_len * group_size, BLOCK_M), num_kv_heads, num_seqs)
    # row |-> (query token row // group_size, head row % group_size of my KV head)
    my_kv_head = tl.program_id(1)
    my_seq = tl.program_id(2).to(tl.int64)
    my_first_token = tl.load(cu_seqlens_q + my_seq).to(tl.int64)
    my_query_len = (tl.load(cu_seqlens_q + my_seq + 1) - my_first_token).to(tl.int32)
    my_first_row = tl.program_id(0) * BLOCK_M
    if my_first_row >= my_query_len * group_size:
        return
    my_context = tl.load(context_lens + my_seq).to(tl.int32)
    my_offset = my_context - my_query_len  # position of the first query

    rows = my_first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = rows // group_size
    heads = my_kv_head * group_size + rows % group_size
    row_mask = (tokens < my_query_len)[:, None] & (dims < head_dim)[None, :]
    token_ids = my_first_token + tokens
    my_q = tl.load(
        q + token_ids[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :],
        mask=row_mask,
        other=0.0,
    )
    my_table = block_tables + my_seq * tables_stride_seq
    my_keys = kv_cache + my_kv_head * cache_stride_head
    my_values = my_keys + cache_stride_kv

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Nothing past the last row's own position is seen by any row. Position 0 is seen by all, so
    # `best` is finite after the first tile.
    my_end = tl.minimum(my_context, my_offset + (my_first_row + BLOCK_M - 1) // group_size + 1)
    for start in range(0, my_end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        valid = positions < my_end
        blocks = tl.load(my_table + positions // block_size, mask=valid, other=0).to(tl.int64)
        slots = blocks * cache_stride_block + (positions % block_size) * cache_stride_slot
        tile_mask = valid[:, None] & (dims < head_dim)[None, :]
        k = tl.load(my_keys + slots[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        scores = tl.dot(my_q, tl.trans(k), input_precision="ieee") * scale
        seen = positions[None, :] <= (my_offset + tokens)[:, None]
        scores = tl.where(seen & valid[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(my_values + slots[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    tl.store(
        out
        + token_ids[:, None] * out_stride_token
        + heads[:, None] * out_stride_head
        + dims[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=row_mask,
    )
