"""The product of queries, keys and values, whose heads are normed, rotated and stored at once."""

import triton
import triton.language as tl

from tandem.kernels.linear.products import multiplied, tile_of_program


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def qkv_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, in_size]
    token_scales,
    norm,  # [in_size] where it has a norm
    matrix,  # [(num_heads + 2 * num_kv_heads) * head_dim, in_size], or as linear_kernel takes codes
    scales,
    zeros,
    bias,  # [(num_heads + 2 * num_kv_heads) * head_dim] where it has one
    partials,
    arrivals,
    qk_norm,  # [num_heads + num_kv_heads, head_dim] where HAS_QK_NORM
    rope_table,  # [max_len, 2, head_dim]
    positions,  # [num_tokens]
    slot_mapping,  # [num_tokens]
    kv_cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    q_out,  # [num_tokens, num_heads, head_dim]
    num_tokens,
    x_stride,
    cache_stride_block,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    SHAPE: tl.constexpr,  # pair_size is half of head_dim
):
    # grid: (ceil(all heads * HALF / BLOCK_N), ceil(num_tokens / BLOCK_M), splits if is_shared)
    # column |-> (head, dim of its first half), with the dim's partner in the second half
    HALF: tl.constexpr = head_dim // 2
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    my_tokens, my_columns = tile_of_program(SHAPE)
    is_token = my_tokens < num_tokens
    is_column = my_columns < (num_heads + 2 * num_kv_heads) * HALF
    tokens, weight = (x, x_stride, token_scales, norm), (matrix, scales, zeros)
    tile = (my_tokens, is_token, my_columns, is_column)
    first, second, is_last = multiplied(tokens, weight, bias, partials, arrivals, tile, eps, SHAPE)
    if is_last:
        heads, dims = my_columns // HALF, my_columns % HALF
        is_q = heads < num_heads
        is_rotated = heads < num_heads + num_kv_heads
        if HAS_QK_NORM:
            # The tile holds whole heads.
            squares = tl.reshape(first * first + second * second, (BLOCK_M, BLOCK_N // HALF, HALF))
            inverse = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / head_dim + eps)
            inverse = tl.broadcast_to(inverse, (BLOCK_M, BLOCK_N // HALF, HALF))
            inverse = tl.reshape(inverse, (BLOCK_M, BLOCK_N))
            scale = qk_norm + heads * head_dim + dims
            a = tl.load(scale, mask=is_rotated, other=0.0).to(tl.float32)
            b = tl.load(scale + HALF, mask=is_rotated, other=0.0).to(tl.float32)
            first = tl.where(is_rotated[None, :], first * inverse * a[None, :], first)
            second = tl.where(is_rotated[None, :], second * inverse * b[None, :], second)
        my_positions = tl.load(positions + my_tokens, mask=is_token, other=0).to(tl.int64)
        my_slots = tl.load(slot_mapping + my_tokens, mask=is_token, other=-1).to(tl.int64)
        # Both halves turn by one angle; the sine of the table's second half has its own sign.
        angles = rope_table + my_positions[:, None] * (2 * head_dim) + dims[None, :]
        turns = is_token[:, None] & (is_rotated & is_column)[None, :]
        cos = tl.load(angles, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(angles + (head_dim + HALF), mask=turns, other=0.0).to(tl.float32)
        rotated_first = (first * cos - second * sin).to(q_out.dtype.element_ty)
        rotated_second = (second * cos + first * sin).to(q_out.dtype.element_ty)

        my_q = q_out + my_tokens.to(tl.int64)[:, None] * (num_heads * head_dim)
        my_q += (heads * head_dim + dims)[None, :]
        stores_q = is_token[:, None] & is_q[None, :]
        tl.store(my_q, rotated_first, mask=stores_q)
        tl.store(my_q + HALF, rotated_second, mask=stores_q)

        # keys and then values of a block: a record of each head
        records = heads - num_heads
        my_record = my_slots // block_size * cache_stride_block + my_slots % block_size * head_dim
        my_kv = kv_cache + my_record[:, None] + (records * (block_size * head_dim) + dims)[None, :]
        stores_kv = (is_token & (my_slots >= 0))[:, None] & (is_column & ~is_q)[None, :]
        tl.store(my_kv, rotated_first, mask=stores_kv)
        tl.store(my_kv + HALF, rotated_second, mask=stores_kv)
