"""Decode attention: one query token per sequence over its paged context."""

import torch
import triton
import triton.language as tl

TILE_TOKENS = 64  # context positions per step of the online softmax
MIN_DOT_ROWS = 16  # tl.dot takes no tile with fewer rows


def paged_decode_attention(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    context_lens: torch.Tensor,  # [num_seqs] positions attended, the query's own included
    scale: float,
    out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
) -> None:
    """One query token per sequence attends over its whole context.

    Entries of `block_tables` past a sequence's context are never read, nor are slots past it.
    """
    num_seqs, num_heads, head_dim = q.shape
    if num_seqs == 0:
        return
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    assert q.dtype == kv_cache.dtype == out.dtype
    assert num_heads % num_kv_heads == 0 and kv_cache.shape[4] == head_dim
    assert q.stride(2) == out.stride(2) == kv_cache.stride(4) == 1
    assert block_tables.stride(1) == 1 and context_lens.stride(0) == 1
    group_size = num_heads // num_kv_heads
    _paged_decode_kernel[(num_seqs, num_kv_heads)](
        q,
        kv_cache,
        block_tables,
        context_lens,
        out,
        scale,
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        block_tables.stride(0),
        *out.stride()[:2],
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        BLOCK_G=max(MIN_DOT_ROWS, triton.next_power_of_2(group_size)),
        BLOCK_N=TILE_TOKENS,
        BLOCK_D=max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _paged_decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_seqs, num_heads, head_dim]
    kv_cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables,  # [num_seqs, max_blocks]
    context_lens,  # [num_seqs]
    out,  # [num_seqs, num_heads, head_dim]
    scale,
    q_stride_seq,
    q_stride_head,
    cache_stride_block,
    cache_stride_kv,
    cache_stride_head,
    cache_stride_slot,
    tables_stride_seq,
    out_stride_seq,
    out_stride_head,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (num_seqs, num_kv_heads); the query heads of one KV head are the rows of one tile
    my_seq = tl.program_id(0).to(tl.int64)
    my_kv_head = tl.program_id(1)
    my_context = tl.load(context_lens + my_seq).to(tl.int32)
    rows = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    my_heads = my_kv_head * group_size + rows
    row_mask = (rows < group_size)[:, None] & (dims < head_dim)[None, :]
    my_q = tl.load(
        q + my_seq * q_stride_seq + my_heads[:, None] * q_stride_head + dims[None, :],
        mask=row_mask,
        other=0.0,
    )
    my_table = block_tables + my_seq * tables_stride_seq
    my_keys = kv_cache + my_kv_head * cache_stride_head
    my_values = my_keys + cache_stride_kv

    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, my_context, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        valid = positions < my_context
        blocks = tl.load(my_table + positions // block_size, mask=valid, other=0).to(tl.int64)
        slots = blocks * cache_stride_block + (positions % block_size) * cache_stride_slot
        tile_mask = valid[:, None] & (dims < head_dim)[None, :]
        k = tl.load(my_keys + slots[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        scores = tl.dot(my_q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(my_values + slots[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    tl.store(
        out + my_seq * out_stride_seq + my_heads[:, None] * out_stride_head + dims[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=row_mask,
    )
