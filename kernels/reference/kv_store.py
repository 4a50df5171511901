"""The PyTorch reference implementation of tandem.kernels.layers.kv_store."""

from dataclasses import dataclass

import torch

from tandem.kernels.reference.norm import inverse_rms


@dataclass(slots=True, frozen=True)
class StorePlan:
    """Indices that the stores of all layers of a step share."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim], float32
    sin: torch.Tensor  # [num_tokens, 1, head_dim], negated in its first half
    kept: torch.Tensor | None  # tokens with a slot; None: all
    where: tuple[torch.Tensor, torch.Tensor]  # block and offset of each of these


def plan_store(
    rope_table: torch.Tensor,  # [max_len, 2, head_dim]
    positions: torch.Tensor,  # [num_tokens]
    slot_mapping: torch.Tensor,  # [num_tokens]
    block_size: int,
) -> StorePlan:
    """Make the `plan` for store_qkv of these tokens, in any layer of the pool."""
    cos, sin = rope_table.index_select(0, positions).float().split_with_sizes([1, 1], 1)
    kept = None
    if len(slot_mapping) and int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping = slot_mapping[kept]
    block_ids = slot_mapping.div(block_size, rounding_mode="floor")
    return StorePlan(cos, sin, kept, (block_ids, slot_mapping.sub(block_ids, alpha=block_size)))


def store_qkv(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk_norm: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim], None: no norm
    rope_table: torch.Tensor,  # [max_len, 2, head_dim]: cosine, sine negated in its first half
    positions: torch.Tensor,  # [num_tokens]
    slot_mapping: torch.Tensor,  # [num_tokens] |-> block_id * block_size + offset, < 0: nowhere
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    eps: float,
    q_out: torch.Tensor,  # [num_tokens, num_heads, head_dim], may be qkv's own queries
    *,
    plan: StorePlan | None = None,
) -> None:
    """Norm and rotate queries into q_out and keys into the cache; store values unchanged.

    Where q_out is qkv's own queries, qkv's keys are rotated in place too. `plan` is that of
    `plan_store` for the same arguments, made here if it is None.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    num_kv_heads = kv_cache.shape[2]
    num_heads = num_rows - 2 * num_kv_heads
    if num_tokens == 0:
        return
    if plan is None:
        plan = plan_store(rope_table, positions, slot_mapping, kv_cache.shape[3])
    in_place = q_out.data_ptr() == qkv.data_ptr()
    if not in_place:
        qkv = qkv.clone()
    qk = qkv[:, : num_heads + num_kv_heads]
    x = qk.float()
    if qk_norm is not None:
        x = (x * inverse_rms(x, eps)).mul_(qk_norm)
    first, second = x.tensor_split(2, -1)
    swapped = torch.cat((second, first), -1)
    if qk.dtype == torch.float32:
        torch.addcmul(x * plan.cos, swapped, plan.sin, out=qk)
    else:
        qk.copy_(torch.addcmul(x * plan.cos, swapped, plan.sin))
    if not in_place:
        q_out.copy_(qkv[:, :num_heads])
    kv = qkv[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
    if plan.kept is not None:
        kv = kv[plan.kept]
    kv_cache.permute(0, 3, 1, 2, 4).index_put_(plan.where, kv.to(kv_cache.dtype))
