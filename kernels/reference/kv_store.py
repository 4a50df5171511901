"""The PyTorch twin of tandem.kernels.kv_store."""

import torch
import torch.nn.functional as F


def store_qkv(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk_norm: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim], None: no norm
    rope_table: torch.Tensor,  # [max_len, 2, head_dim]: cosine, sine negated in its first half
    positions: torch.Tensor,  # [num_tokens]
    slot_mapping: torch.Tensor,  # [num_tokens] |-> block_id * block_size + offset, < 0: nowhere
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    eps: float,
    q_out: torch.Tensor,  # [num_tokens, num_heads, head_dim], may be qkv's own queries
) -> None:
    """Norm and rotate queries into q_out and keys into the cache; values go there as they are.

    Where q_out is qkv's own queries, qkv's keys are rotated in place too.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    num_kv_heads = kv_cache.shape[2]
    num_heads = num_rows - 2 * num_kv_heads
    if num_tokens == 0:
        return
    in_place = q_out.data_ptr() == qkv.data_ptr()
    if not in_place:
        qkv = qkv.clone()
    qk = qkv[:, : num_heads + num_kv_heads]
    x = qk.float()
    if qk_norm is not None:
        x = F.rms_norm(x, (head_dim,), None, eps) * qk_norm
    cos, sin = rope_table.index_select(0, positions).split_with_sizes([1, 1], 1)
    swapped = x.roll(head_dim // 2, -1)
    if x.dtype == qk.dtype:
        torch.addcmul(x * cos, swapped, sin, out=qk)
    else:
        qk.copy_(torch.addcmul(x * cos, swapped, sin.float()))
    if not in_place:
        q_out.copy_(qkv[:, :num_heads])
    kv = qkv[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
    if int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        kv, slot_mapping = kv[kept], slot_mapping[kept]
    block_size = kv_cache.shape[3]
    block_ids = slot_mapping.div(block_size, rounding_mode="floor")
    offsets = slot_mapping.sub(block_ids, alpha=block_size)
    kv_cache.permute(0, 3, 1, 2, 4).index_put_((block_ids, offsets), kv)
