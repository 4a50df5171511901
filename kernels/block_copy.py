"""Copying blocks, or some heads of them, between the pool and contiguous staging memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tandem.kernels.tuned import tuned_config

VECTOR = tl.constexpr(2)  # 8-byte words of a 16-byte load
WORD_BYTES = 8
WARP_LANES = 32


@dataclass(frozen=True, slots=True)
class BlockCopyConfig:
    """How much a program copies, all of it in flight at once, and with how many warps."""

    tile_bytes: int
    num_warps: int


DEFAULT = BlockCopyConfig(tile_bytes=16384, num_warps=8)


def candidates() -> Iterator[BlockCopyConfig]:
    """The configurations worth measuring: one to eight 16-byte loads in flight per thread."""
    for num_warps in (2, 4, 8):
        for num_loads in (1, 2, 4, 8):
            yield BlockCopyConfig(num_loads * num_warps * WARP_LANES * 16, num_warps)


def gather_blocks(
    pool: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    block_ids: torch.Tensor,  # [num_ids]
    staging: torch.Tensor,  # [num_ids, num_layers, 2, num_staged_heads, block_size, head_dim]
    *,
    first_head: int = 0,
    config: BlockCopyConfig | None = None,
) -> None:
    """Copy the heads from `first_head` on of each named block into its row of `staging`.

    A block id below 0 leaves its row alone. Both tensors are contiguous and of one dtype, any; a
    head's keys of one block are whole 16-byte words. Ids must lie inside `pool`: they are on the
    device, so this can't check them.
    """
    _copy(pool, block_ids, staging, first_head, config, to_pool=False)


def scatter_blocks(
    staging: torch.Tensor,  # [num_ids, num_layers, 2, num_staged_heads, block_size, head_dim]
    pool: torch.Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    block_ids: torch.Tensor,  # [num_ids]
    *,
    first_head: int = 0,
    config: BlockCopyConfig | None = None,
) -> None:
    """Copy each row of `staging` into the heads from `first_head` on of its named block.

    The contract is gather_blocks's. No id may stand twice, but those below 0.
    """
    _copy(pool, block_ids, staging, first_head, config, to_pool=True)


def _copy(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    staging: torch.Tensor,
    first_head: int,
    config: BlockCopyConfig | None,
    to_pool: bool,
) -> None:
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    num_staged_heads = staging.shape[3]
    shape = (len(block_ids), num_layers, 2, num_staged_heads, block_size, head_dim)
    assert staging.shape == shape and staging.dtype == pool.dtype
    assert 0 <= first_head <= num_kv_heads - num_staged_heads
    assert pool.is_contiguous() and staging.is_contiguous() and block_ids.is_contiguous()
    head_bytes = block_size * head_dim * pool.element_size()
    assert head_bytes % (VECTOR.value * WORD_BYTES) == 0
    if staging.numel() == 0:
        return
    # A run is what lies together on both sides: the wanted heads of one layer's keys, or values,
    # or the whole block.
    head_words = head_bytes // WORD_BYTES
    num_runs = 1 if num_staged_heads == num_kv_heads else num_layers * 2
    pool_words = num_layers * 2 * num_kv_heads * head_words
    staged_words = num_layers * 2 * num_staged_heads * head_words
    assert pool_words < 2**31
    if config is None:
        config = tuned_config(DEFAULT, "block_copy", whole_blocks=num_runs == 1, to_pool=to_pool)
    tile_words = config.tile_bytes // WORD_BYTES
    _copy_blocks_kernel[(len(block_ids) * triton.cdiv(staged_words, tile_words),)](
        pool.view(-1).view(torch.int64),
        block_ids,
        staging.view(-1).view(torch.int64),
        first_head * head_words // VECTOR.value,
        pool_words=pool_words,
        staged_words=staged_words,
        num_runs=num_runs,
        TO_POOL=to_pool,
        TILE=tile_words,
        num_warps=config.num_warps,
    )


# One build for whichever heads: their place is counted in 16-byte words, and so always aligned.
@triton.jit(do_not_specialize=["first_vector"])  # type: ignore[untyped-decorator]
def _copy_blocks_kernel(  # type: ignore[no-untyped-def]
    pool,  # [num_blocks, pool_words]
    block_ids,  # [num_ids]
    staging,  # [num_ids, staged_words]
    first_vector,
    pool_words: tl.constexpr,
    staged_words: tl.constexpr,
    num_runs: tl.constexpr,
    TO_POOL: tl.constexpr,
    TILE: tl.constexpr,
):
    # grid: (num_ids * tiles of a staged block,)
    tiles_per_block: tl.constexpr = (staged_words + TILE - 1) // TILE
    my_row = tl.program_id(0) // tiles_per_block
    my_tile = tl.program_id(0) % tiles_per_block
    my_block = tl.load(block_ids + my_row).to(tl.int64)
    if my_block < 0:
        return
    words = my_tile * TILE + tl.arange(0, TILE)
    mask = words < staged_words
    run_words: tl.constexpr = staged_words // num_runs
    run_stride: tl.constexpr = pool_words // num_runs
    in_pool = words // run_words * run_stride + words % run_words + first_vector * VECTOR
    # A pool is larger than 2**31 words, and staging may be: rows are 64 bits wide.
    pooled = pool + my_block * pool_words + in_pool
    staged = staging + my_row.to(tl.int64) * staged_words + words
    if TO_POOL:
        tl.store(pooled, tl.load(staged, mask=mask), mask=mask)
    else:
        tl.store(staged, tl.load(pooled, mask=mask), mask=mask)
