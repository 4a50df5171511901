"""Reads of the paged cache, for the reference implementations of both attentions."""

import torch


def record_index(
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    longest: int,
) -> torch.Tensor:
    """Return where the first `longest` positions are among one layer's (block, k|v, head) records.

    The pool's layout keeps a record contiguous. The index is the same for every layer.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    block_stride, kv_stride, head_stride, token_stride, _ = kv_cache.stride()
    record = block_size * head_dim
    assert token_stride == head_dim and head_stride == record, "a head's block is contiguous"
    assert kv_stride == num_kv_heads * record and block_stride % record == 0
    my_blocks = block_tables[:, : (longest - 1) // block_size + 1]
    heads = torch.arange(2 * num_kv_heads, device=kv_cache.device).view(2, 1, num_kv_heads, 1)
    return ((my_blocks * (block_stride // record)).unsqueeze(1) + heads).flatten()


def gather_context(
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    index: torch.Tensor,  # of record_index
    num_seqs: int,
    longest: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values, each [num_seqs * num_kv_heads, longest, head_dim] in `dtype`."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    record = block_size * head_dim
    records_per_block = kv_cache.stride(0) // record
    num_records = (num_blocks - 1) * records_per_block + 2 * num_kv_heads
    records = kv_cache.as_strided((num_records, record), (record, 1))
    gathered = records.index_select(0, index).to(dtype)
    k, v = gathered.view(2, num_seqs * num_kv_heads, -1, head_dim)[:, :, :longest].unbind(0)
    return k, v
