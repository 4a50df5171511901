"""The PyTorch twin of tandem.kernels.block_copy."""

import torch


def gather_blocks(
    pool: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    block_ids: torch.Tensor,  # [num_ids]
    staging: torch.Tensor,  # [num_ids, num_layers, 2, num_staged_heads, block_size, head_dim]
    *,
    first_head: int = 0,
) -> None:
    """Copy the heads from `first_head` on of each named block into its row of `staging`.

    A block id below 0 leaves its row alone.
    """
    rows = (block_ids >= 0).nonzero().flatten()
    heads = slice(first_head, first_head + staging.shape[3])
    staging[rows] = pool[block_ids[rows], :, :, heads]


def scatter_blocks(
    staging: torch.Tensor,  # [num_ids, num_layers, 2, num_staged_heads, block_size, head_dim]
    pool: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    block_ids: torch.Tensor,  # [num_ids]
    *,
    first_head: int = 0,
) -> None:
    """Copy each row of `staging` into the heads from `first_head` on of its named block.

    A block id below 0 leaves its row unread; no other may stand twice.
    """
    rows = (block_ids >= 0).nonzero().flatten()
    heads = slice(first_head, first_head + staging.shape[3])
    pool[block_ids[rows], :, :, heads] = staging[rows]
