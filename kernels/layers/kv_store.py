"""From the QKV projection's result to rotated queries, and keys and values in the cache."""

# In a kernel, a tuple grows and a name changes its type.
# mypy: disable-error-code="assignment,var-annotated"

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import VECTOR_BYTES, WARP, num_multiprocessors, tuned_config


@dataclass(frozen=True, slots=True)
class StoreQkvConfig:
    """`num_pieces` tiles of a token per program, each of up to `block_heads` heads."""

    block_heads: int
    num_pieces: int
    num_warps: int


def store_qkv(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk_norm: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim], None: no norm
    rope_table: torch.Tensor,  # [max_len, 2, head_dim]: cosine, sine negated in its first half
    positions: torch.Tensor,  # [num_tokens] each below max_len, padding's too
    slot_mapping: torch.Tensor,  # [num_tokens] |-> block_id * block_size + offset, < 0: nowhere
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    eps: float,
    q_out: torch.Tensor,  # [num_tokens, num_heads, head_dim], may be qkv's own queries
    *,
    config: StoreQkvConfig | None = None,
) -> None:
    """Norm and rotate queries into q_out and keys into the cache; store values unchanged.

    Computes in float32, rounded once, at the store. A token without a slot still gets its queries.
    `qkv` is not changed unless q_out is a view of it; then its keys may change too.
    """
    num_tokens, _, head_dim = qkv.shape
    num_heads, num_kv_heads, block_size = q_out.shape[1], *kv_cache.shape[2:4]
    if num_tokens == 0:
        return
    _check(qkv, qk_norm, rope_table, positions, slot_mapping, kv_cache, q_out)
    if config is None:
        few = num_tokens < 4 * num_multiprocessors(qkv.device)
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        shape["element_bytes"] = qkv.element_size()
        config = tuned_config(
            default_config(few, **shape), "store_qkv", few_tokens=int(few), **shape
        )
    num_pieces = _num_pieces(num_heads, num_kv_heads, config.block_heads)
    num_programs = cdiv(num_pieces, config.num_pieces)
    _store_qkv_kernel[(num_tokens * num_programs,)](
        qkv,
        qkv if qk_norm is None else qk_norm,
        rope_table,
        positions,
        slot_mapping,
        kv_cache,
        q_out,
        *qkv.stride()[:2],
        *kv_cache.stride()[:4],
        *q_out.stride()[:2],
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        HAS_NORM=qk_norm is not None,
        NUM_PROGRAMS=num_programs,
        NUM_PIECES=config.num_pieces,
        BLOCK_HEADS=config.block_heads,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=config.num_warps,
        **launch_options(),
    )


def _check(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    q_out: torch.Tensor,
) -> None:
    """Assert what `store_qkv` and its kernel expect of the tensors."""
    num_tokens, num_rows, head_dim = qkv.shape
    num_heads, num_kv_heads = q_out.shape[1], kv_cache.shape[2]
    assert num_rows == num_heads + 2 * num_kv_heads and head_dim % 2 == 0
    assert q_out.shape == (num_tokens, num_heads, head_dim) and kv_cache.shape[1] == 2
    assert kv_cache.shape[4] == head_dim and rope_table.shape[1:] == (2, head_dim)
    assert qkv.dtype == q_out.dtype == kv_cache.dtype
    assert qkv.stride(2) == q_out.stride(2) == kv_cache.stride(4) == 1
    assert rope_table.is_contiguous() and positions.stride(0) == slot_mapping.stride(0) == 1
    if qk_norm is not None:
        assert qk_norm.shape == (num_heads + num_kv_heads, head_dim) and qk_norm.is_contiguous()


@cache
def default_config(
    few_tokens: bool, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> StoreQkvConfig:
    """Return a 16-byte vector of each half per thread and piece, and up to six pieces in flight.

    For few tokens, one piece per program of one warp, which spreads them over the chip.
    """
    per_warp = _heads_of_a_warp(head_dim, element_bytes)
    if few_tokens:
        return StoreQkvConfig(per_warp, 1, 1)
    num_warps = 1
    while num_warps < 4 and 2 * num_warps * per_warp <= num_kv_heads:
        num_warps *= 2
    num_pieces = _num_pieces(num_heads, num_kv_heads, per_warp * num_warps)
    num_programs = cdiv(num_pieces, 6)
    return StoreQkvConfig(per_warp * num_warps, cdiv(num_pieces, num_programs), num_warps)


def candidates(
    num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> Iterator[StoreQkvConfig]:
    """Yield the configurations worth measuring: one to six vectors of each half per thread."""
    per_warp = _heads_of_a_warp(head_dim, element_bytes)
    for num_warps in (1, 2, 4):
        for num_pieces in (1, 2, 3, 4, 6):
            yield StoreQkvConfig(per_warp * num_warps, num_pieces, num_warps)


def _num_pieces(num_heads: int, num_kv_heads: int, block_heads: int) -> int:
    """Count the tiles of a token's heads, none with heads of two kinds."""
    q_pieces = cdiv(num_heads, block_heads)
    kv_pieces = cdiv(num_kv_heads, block_heads)
    return q_pieces + 2 * kv_pieces


def _heads_of_a_warp(head_dim: int, element_bytes: int) -> int:
    """Count the heads of which one warp loads a half at once, a 16-byte vector per thread."""
    half_bytes = next_power_of_2(head_dim // 2) * element_bytes
    return max(1, WARP * VECTOR_BYTES // max(half_bytes, VECTOR_BYTES))


@triton.jit  # type: ignore[untyped-decorator]
def _store_qkv_kernel(  # type: ignore[no-untyped-def]
    qkv,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk_norm,  # [num_heads + num_kv_heads, head_dim]
    rope_table,  # [max_len, 2, head_dim]
    positions,  # [num_tokens]
    slot_mapping,  # [num_tokens]
    kv_cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    q_out,  # [num_tokens, num_heads, head_dim]
    qkv_stride_token,
    qkv_stride_head,
    cache_stride_block,
    cache_stride_kv,
    cache_stride_head,
    cache_stride_slot,
    q_stride_token,
    q_stride_head,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # grid: (num_tokens * NUM_PROGRAMS,), the programs of a token side by side
    HALF: tl.constexpr = head_dim // 2
    NUM_QK: tl.constexpr = num_heads + num_kv_heads
    my_token = (tl.program_id(0) // NUM_PROGRAMS).to(tl.int64)
    my_first_piece = tl.program_id(0) % NUM_PROGRAMS * NUM_PIECES
    wait_for_predecessor()
    my_position = tl.load(positions + my_token).to(tl.int64)
    my_slot = tl.load(slot_mapping + my_token).to(tl.int64)
    # A half's partner lies in the same lane: nothing changes threads to be rotated.
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    is_dim = dims < HALF
    firsts = ()
    seconds = ()
    for piece in tl.static_range(NUM_PIECES):
        kind, heads, is_head = _heads_of(
            my_first_piece + piece, num_heads, num_kv_heads, BLOCK_HEADS
        )
        rows = tl.where(kind == 0, 0, tl.where(kind == 1, num_heads, NUM_QK)) + heads
        source = qkv + my_token * qkv_stride_token + rows * qkv_stride_head + dims
        firsts += (tl.load(source, mask=is_head & is_dim, other=0.0),)
        seconds += (tl.load(source + HALF, mask=is_head & is_dim, other=0.0),)
    # Both halves turn by one angle; the sine of the table's second half has its own sign.
    my_angles = rope_table + my_position * (2 * head_dim) + tl.zeros_like(heads) + dims
    cos = tl.load(my_angles, mask=is_dim, other=0.0)
    sin = tl.load(my_angles + (head_dim + HALF), mask=is_dim, other=0.0)
    if HAS_NORM and NUM_PIECES == 1:
        first_scale, second_scale = _load_scales(qk_norm, rows, dims, head_dim, NUM_QK)
    # Every load is on its way before the first value is used: without the barrier the compiler
    # puts the angles off until the norm is done, and a program waits twice. (The norm's weights
    # are soon in L1. With those of several pieces there were too many registers in use, and the
    # compiler would put off loads of the later pieces.)
    tl.debug_barrier()
    # A pool is larger than 2**31 values: slots are widened before they become offsets.
    my_record = kv_cache + my_slot // block_size * cache_stride_block
    my_record += my_slot % block_size * cache_stride_slot
    for piece in tl.static_range(NUM_PIECES):
        kind, heads, is_head = _heads_of(
            my_first_piece + piece, num_heads, num_kv_heads, BLOCK_HEADS
        )
        mask = is_head & is_dim
        first, second = firsts[piece], seconds[piece]
        if kind < 2:
            a, b = first.to(tl.float32), second.to(tl.float32)
            if HAS_NORM:
                if NUM_PIECES > 1:
                    rows = tl.where(kind == 0, 0, num_heads) + heads
                    first_scale, second_scale = _load_scales(qk_norm, rows, dims, head_dim, NUM_QK)
                inverse = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / head_dim + eps)
                a *= inverse * first_scale
                b *= inverse * second_scale
            first = (a * cos - b * sin).to(first.dtype)
            second = (b * cos + a * sin).to(second.dtype)
        if kind == 0:
            target = q_out + my_token * q_stride_token + heads * q_stride_head + dims
        else:
            target = my_record + (kind - 1) * cache_stride_kv + heads * cache_stride_head + dims
            mask &= my_slot >= 0
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _load_scales(  # type: ignore[no-untyped-def]
    qk_norm,  # [num_heads + num_kv_heads, head_dim]
    rows,
    dims,
    head_dim: tl.constexpr,
    NUM_QK: tl.constexpr,
):
    """Both halves of the norm's weights for some heads, nothing for values."""
    mask = (rows < NUM_QK) & (dims < head_dim // 2)
    scale = qk_norm + rows * head_dim + dims
    first = tl.load(scale, mask=mask, other=0.0, eviction_policy="evict_last")
    second = tl.load(scale + head_dim // 2, mask=mask, other=0.0, eviction_policy="evict_last")
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _heads_of(  # type: ignore[no-untyped-def]
    piece, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, BLOCK_HEADS: tl.constexpr
):
    """0 for a piece of the queries, 1 keys, 2 values; its heads; which of them there are."""
    Q_PIECES: tl.constexpr = (num_heads + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_PIECES: tl.constexpr = (num_kv_heads + BLOCK_HEADS - 1) // BLOCK_HEADS
    is_kv = piece >= Q_PIECES
    is_value = piece >= Q_PIECES + KV_PIECES
    piece -= tl.where(is_value, Q_PIECES + KV_PIECES, tl.where(is_kv, Q_PIECES, 0))
    heads = piece * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    is_head = heads < tl.where(is_kv, num_kv_heads, num_heads)
    return is_kv.to(tl.int32) + is_value.to(tl.int32), heads, is_head
