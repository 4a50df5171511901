"""PyTorch twins of the Triton launchers: same signatures, same results, any device.

They are what runs on a machine without a GPU, and what the kernels are tested against.
"""

import torch
import torch.nn.functional as F


def store_kv(
    kv: torch.Tensor,  # [num_tokens, 2, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    slot_mapping: torch.Tensor,  # [num_tokens] token |-> block_id * block_size + offset
) -> None:
    """Write every token's key and value into its slot of one layer's cache, in place."""
    block_size = kv_cache.shape[3]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    kv_cache.permute(0, 3, 1, 2, 4).index_put_(where, kv)


def paged_decode_attention(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    context_lens: torch.Tensor,  # [num_seqs] positions attended, the query's own included
    scale: float,
    out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
) -> None:
    """One query token per sequence attends over its whole context.

    Unlike the kernel, the twin multiplies what it masks by zero: every block named in
    `block_tables`, padding included, must hold finite numbers.
    """
    if q.shape[0] == 0:
        return
    lens: list[int] = context_lens.tolist()
    longest = max(lens)
    if longest * len(lens) <= 2 * sum(lens):
        _decode_padded(q, kv_cache, block_tables, context_lens, longest, scale, out)
        return
    # Padding would be most of the work: sequences of like length go together.
    buckets: dict[int, list[int]] = {}
    for row, length in enumerate(lens):
        buckets.setdefault(length.bit_length(), []).append(row)
    for rows in buckets.values():
        index = torch.tensor(rows, device=q.device)
        part = torch.empty_like(out[index])
        longest = max(lens[row] for row in rows)
        _decode_padded(
            q[index], kv_cache, block_tables[index], context_lens[index], longest, scale, part
        )
        out[index] = part


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
    queries must be stored already.
    """
    starts: list[int] = cu_seqlens_q.tolist()
    lens: list[int] = context_lens.tolist()
    group_size = q.shape[1] // kv_cache.shape[2]
    for row, context_len in enumerate(lens):
        my_queries = slice(starts[row], starts[row + 1])
        query_len = my_queries.stop - my_queries.start
        if query_len == 0:
            continue
        k, v = _gather(kv_cache, block_tables[row : row + 1], context_len)
        mask = None
        if 1 < query_len < context_len:
            mask = torch.ones(query_len, context_len, dtype=torch.bool, device=q.device)
            mask = mask.tril_(context_len - query_len)
        attended = F.scaled_dot_product_attention(
            q[my_queries].transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=mask,
            is_causal=query_len == context_len > 1,
            scale=scale,
            enable_gqa=group_size > 1,
        )
        out[my_queries] = attended[0].transpose(0, 1)


def _decode_padded(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[2]
    k, v = _gather(kv_cache, block_tables, longest)
    mask = None
    if num_seqs > 1:
        positions = torch.arange(longest, device=q.device)
        mask = (positions < context_lens.unsqueeze(1)).view(num_seqs, 1, 1, longest)
    # The query heads of one KV head stand as rows of one query: K and V are read once.
    packed = (num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(q.view(packed), k, v, attn_mask=mask, scale=scale)
    out.view(packed).copy_(attended)


def _gather(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_seqs, num_kv_heads, longest, head_dim] of the first positions.

    One copy of whole (block, k|v, head) records, which the pool's layout keeps contiguous.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    block_stride, kv_stride, head_stride, token_stride, _ = kv_cache.stride()
    record = block_size * head_dim
    assert token_stride == head_dim and head_stride == record, "a head's block is contiguous"
    assert kv_stride == num_kv_heads * record and block_stride % record == 0
    records_per_block = block_stride // record
    num_records = (num_blocks - 1) * records_per_block + 2 * num_kv_heads
    records = kv_cache.as_strided((num_records, record), (record, 1))
    my_blocks = block_tables[:, : -(-longest // block_size)]
    heads = torch.arange(2 * num_kv_heads, device=kv_cache.device).view(2, 1, num_kv_heads, 1)
    index = (my_blocks * records_per_block).unsqueeze(1) + heads
    gathered = records.index_select(0, index.flatten()).view(
        2, my_blocks.shape[0], num_kv_heads, my_blocks.shape[1] * block_size, head_dim
    )
    k, v = gathered[:, :, :, :longest].unbind(0)
    return k, v
