"""Tokens times a weight matrix, of numbers or stored as codes, in one order of sums."""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from tandem.kernels.linear.codes import add_product


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, in_size]
    matrix,  # [out_size, in_size], or of codes of 4 bits [out_size, in_size / 2]
    scales,  # [out_size, num_groups]
    zeros,  # [out_size, num_groups]
    out,  # [num_tokens, out_size]
    num_tokens,
    x_stride,
    in_size: tl.constexpr,
    out_size: tl.constexpr,
    group_size: tl.constexpr,
    num_groups: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(out_size / BLOCK_N), ceil(num_tokens / BLOCK_M))
    my_columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    my_tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_token = my_columns < out_size, my_tokens < num_tokens
    inputs = tl.arange(0, BLOCK_K)
    my_x = x + my_tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, in_size, BLOCK_K):
        mask = is_token[:, None] & (k + inputs < in_size)[None, :]
        tokens = tl.load(my_x + k, mask=mask, other=0.0)
        total = add_product(
            total,
            tokens,
            matrix,
            scales,
            zeros,
            my_columns,
            is_column,
            k,
            in_size,
            group_size,
            num_groups,
            CODE,
            HAS_ZEROS,
            FACTOR,
            BLOCK_K,
        )
    my_out = out + my_tokens.to(tl.int64)[:, None] * out_size + my_columns[None, :]
    mask = is_token[:, None] & is_column[None, :]
    tl.store(my_out, total.to(out.dtype.element_ty), mask=mask)
