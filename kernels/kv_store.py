"""Writing new keys and values into their slots of the paged cache."""

import torch
import triton
import triton.language as tl


def store_kv(
    kv: torch.Tensor,  # [num_tokens, 2, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    slot_mapping: torch.Tensor,  # [num_tokens] token |-> block_id * block_size + offset
) -> None:
    """Write every token's key and value into its slot of one layer's cache, in place."""
    num_tokens, _, num_kv_heads, head_dim = kv.shape
    if num_tokens == 0:
        return
    assert kv.dtype == kv_cache.dtype
    assert kv.stride(3) == 1 and kv_cache.stride(4) == 1 and slot_mapping.stride(0) == 1
    assert kv_cache.shape[1:3] == kv.shape[1:3] and kv_cache.shape[4] == head_dim
    _store_kv_kernel[(num_tokens, 2)](
        kv,
        kv_cache,
        slot_mapping,
        *kv.stride()[:3],
        *kv_cache.stride()[:4],
        block_size=kv_cache.shape[3],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv_kernel(  # type: ignore[no-untyped-def]
    kv,  # [num_tokens, 2, num_kv_heads, head_dim]
    kv_cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    slot_mapping,  # [num_tokens]
    kv_stride_token,
    kv_stride_kv,
    kv_stride_head,
    cache_stride_block,
    cache_stride_kv,
    cache_stride_head,
    cache_stride_slot,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (num_tokens, 2), one program per token and per key or value
    my_token = tl.program_id(0).to(tl.int64)
    my_kv = tl.program_id(1)
    # A pool is larger than 2**31 values: slots are widened before they become offsets.
    my_slot = tl.load(slot_mapping + my_token).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < num_kv_heads) & (dims < head_dim)
    source = kv + my_token * kv_stride_token + my_kv * kv_stride_kv
    values = tl.load(source + heads * kv_stride_head + dims, mask=mask)
    my_block = my_slot // block_size
    my_offset = my_slot % block_size
    target = kv_cache + my_block * cache_stride_block + my_kv * cache_stride_kv
    target += my_offset * cache_stride_slot
    tl.store(target + heads * cache_stride_head + dims, values, mask=mask)
