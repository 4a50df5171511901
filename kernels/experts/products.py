"""Tokens times the matrices of their experts: tiles of choices that are sorted by expert."""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor
from tandem.kernels.linear.codes import add_product


@triton.jit  # type: ignore[untyped-decorator]
def _my_tile(  # type: ignore[no-untyped-def]
    starts,  # [num_experts + 1]
    num_experts: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # Returns the program's expert, its choices in sorted order, and their end.
    my_tile = tl.program_id(1)
    experts = tl.arange(0, BLOCK_EXPERTS)
    first = tl.load(starts + experts, mask=experts < num_experts, other=0).to(tl.int32)
    end = tl.load(starts + experts + 1, mask=experts < num_experts, other=0).to(tl.int32)
    tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= my_tile).to(tl.int32), 0)
    is_mine = experts == expert
    before = tl.sum(tl.where(is_mine, ends - tiles, 0), 0)
    my_first = tl.sum(tl.where(is_mine, first, 0), 0) + (my_tile - before) * BLOCK_M
    return expert, my_first + tl.arange(0, BLOCK_M), tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, hidden_size]
    order,  # [num_choices] choices sorted by expert
    starts,  # [num_experts + 1] of the experts' choices
    gate_up,  # [num_experts, 2 * width, hidden_size], or as add_product takes codes
    scales,
    zeros,
    bias,  # [num_experts, 2 * width]
    opened,  # [num_choices, width] in sorted order
    x_stride,
    alpha,
    limit,
    hidden_size: tl.constexpr,
    width: tl.constexpr,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(width / BLOCK_N), the most tiles that there can be), so that an expert's weights
    # are read while the L2 cache has them
    wait_for_predecessor()
    expert, my_rows, end = _my_tile(starts, num_experts, BLOCK_EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    is_row = my_rows < end
    my_columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = my_columns < width
    my_tokens = tl.load(order + my_rows, mask=is_row, other=0) // num_chosen
    inputs = tl.arange(0, BLOCK_K)
    my_x = x + my_tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    my_gates = expert.to(tl.int64) * (2 * width) + my_columns
    weight = (gate_up, scales, zeros)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, hidden_size, BLOCK_K):
        is_input = k + inputs < hidden_size
        rows = tl.load(my_x + k, mask=is_row[:, None] & is_input[None, :], other=0.0)
        gate = add_product(gate, rows, weight, my_gates, is_column, k, hidden_size, FORM, BLOCK_K)
        up = add_product(
            up, rows, weight, my_gates + width, is_column, k, hidden_size, FORM, BLOCK_K
        )
    if HAS_BIAS:
        my_bias = bias + expert.to(tl.int64) * (2 * width) + my_columns
        gate += tl.load(my_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(my_bias + width, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    result = gate / (1.0 + tl.exp(-alpha * gate)) * up
    my_opened = opened + my_rows.to(tl.int64)[:, None] * width + my_columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(my_opened, result.to(opened.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def down_kernel(  # type: ignore[no-untyped-def]
    opened,  # [num_choices, width] in sorted order
    order,  # [num_choices] choices sorted by expert
    starts,  # [num_experts + 1] of the experts' choices
    down,  # [num_experts, hidden_size, width], or as add_product takes codes
    scales,
    zeros,
    bias,  # [num_experts, hidden_size]
    weights,  # [num_choices]
    results,  # [num_choices, hidden_size] float32
    hidden_size: tl.constexpr,
    width: tl.constexpr,
    num_experts: tl.constexpr,
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(hidden_size / BLOCK_N), the most tiles that there can be)
    wait_for_predecessor()
    expert, my_rows, end = _my_tile(starts, num_experts, BLOCK_EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    is_row = my_rows < end
    my_columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = my_columns < hidden_size
    inputs = tl.arange(0, BLOCK_K)
    my_opened = opened + my_rows.to(tl.int64)[:, None] * width + inputs[None, :]
    weight = (down, scales, zeros)
    my_down = expert.to(tl.int64) * hidden_size + my_columns
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, width, BLOCK_K):
        is_input = k + inputs < width
        rows = tl.load(my_opened + k, mask=is_row[:, None] & is_input[None, :], other=0.0)
        result = add_product(result, rows, weight, my_down, is_column, k, width, FORM, BLOCK_K)
    if HAS_BIAS:
        my_bias = bias + expert.to(tl.int64) * hidden_size + my_columns
        result += tl.load(my_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
    my_choices = tl.load(order + my_rows, mask=is_row, other=0)
    result *= tl.load(weights + my_choices, mask=is_row, other=0.0)[:, None]
    my_results = results + my_choices.to(tl.int64)[:, None] * hidden_size + my_columns[None, :]
    tl.store(my_results, result, mask=is_row[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    results,  # [num_tokens, num_chosen, hidden_size] float32
    out,  # [num_tokens, hidden_size]
    hidden_size: tl.constexpr,
    num_chosen: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # grid: (num_tokens, ceil(hidden_size / BLOCK_WIDTH))
    wait_for_predecessor()
    my_token = tl.program_id(0).to(tl.int64)
    my_columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = my_columns < hidden_size
    my_results = results + my_token * (num_chosen * hidden_size) + my_columns
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for rank in tl.static_range(num_chosen):
        total += tl.load(my_results + rank * hidden_size, mask=mask, other=0.0)
    tl.store(out + my_token * hidden_size + my_columns, total.to(out.dtype.element_ty), mask=mask)
