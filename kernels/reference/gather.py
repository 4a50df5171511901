"""What the twins of both attentions read the paged cache with."""

import torch


def gather_context(
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
