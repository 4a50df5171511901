"""Tokens times a weight matrix, of numbers or stored as codes, in one order of sums.

The inputs are cut into splits; a row's sums are those of the splits, added in their order. For few
tokens each split is a program's, and the last one of a tile adds them up; for many, one program
computes all splits of its tile. The bits are the same. A norm of the tokens, and what is done with
the results, are parts of the kernel.
"""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor
from tandem.kernels.linear.codes import Form, add_product
from tandem.kernels.linear.float8 import as_float8

LINE_BYTES = tl.constexpr(128)  # of the L2 cache


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The constants of a launch, of both kernels with products."""

    in_size: int
    # Column c of each 2 * pair_size rows has row c, and row c + pair_size; 0: each has its row.
    pair_size: int
    form: Form
    has_norm: bool
    has_bias: bool
    num_splits: int
    is_shared: bool
    tiles_together: int  # tiles of tokens by which programs side by side multiply one of the matrix
    prefetched_lines: int  # of each row
    block_m: int
    block_n: int
    block_k: int


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, in_size], rounded to float8 where the matrix is of it, if it is not yet
    token_scales,  # [num_tokens, ceil(in_size / 128)] where x is of float8
    norm,  # [in_size] where it has a norm
    matrix,  # [num_rows, in_size], or of codes of 4 bits [num_rows, in_size / 2]
    scales,  # [num_rows, num_groups]
    zeros,  # [num_rows, num_groups]
    bias,  # [num_rows] where it has one
    partials,  # of each tile and split a record, where splits are shared out
    arrivals,  # [num_tiles] splits finished, zero between launches
    out,  # [num_tokens, out_size]
    num_tokens,
    x_stride,
    eps,
    out_size: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu" or "gelu" of the first out_size rows, times the others; ""
    ADDS: tl.constexpr,  # to what is in out
    SHAPE: tl.constexpr,
):
    # grid: (ceil(out_size / block_n), ceil(num_tokens / block_m), num_splits if is_shared else 1)
    my_tokens, my_columns = tile_of_program(SHAPE)
    is_token, is_column = my_tokens < num_tokens, my_columns < out_size
    tokens, weight = (x, x_stride, token_scales, norm), (matrix, scales, zeros)
    tile = (my_tokens, is_token, my_columns, is_column)
    first, second, is_last = multiplied(tokens, weight, bias, partials, arrivals, tile, eps, SHAPE)
    if is_last:
        my_out = out + my_tokens.to(tl.int64)[:, None] * out_size + my_columns[None, :]
        mask = is_token[:, None] & is_column[None, :]
        if ACTIVATION == "silu":
            first = first / (1.0 + tl.exp(-first)) * second
        elif ACTIVATION == "gelu":
            # as layers.activation computes it
            bent = first + 0.044715 * first * first * first
            first = first / (1.0 + tl.exp(-1.5957691216057308 * bent)) * second
        if ADDS:
            first += tl.load(my_out, mask=mask, other=0.0).to(tl.float32)
        tl.store(my_out, first.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_program(SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program's tokens and columns."""
    my_row, my_column = tl.program_id(1), tl.program_id(0)
    TOGETHER: tl.constexpr = SHAPE.tiles_together
    if TOGETHER > 1:
        # What runs at once then reads a square's edges, which L2 holds, and not a whole matrix.
        my_place = my_row * tl.num_programs(0) + my_column
        first = my_place // (TOGETHER * tl.num_programs(0)) * TOGETHER
        num_rows = tl.minimum(tl.num_programs(1) - first, TOGETHER)
        my_place -= first * tl.num_programs(0)
        my_row, my_column = first + my_place % num_rows, my_place // num_rows
    my_tokens = my_row * SHAPE.block_m + tl.arange(0, SHAPE.block_m)
    return my_tokens, my_column * SHAPE.block_n + tl.arange(0, SHAPE.block_n)


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(  # type: ignore[no-untyped-def]
    tokens,  # x, x_stride, token_scales, norm
    weight,  # matrix, scales, zeros
    bias,
    partials,
    arrivals,
    tile,  # tokens and columns of the program, each with a mask
    eps,
    SHAPE: tl.constexpr,
):
    """The program's tile [block_m, block_n], that of the pairs' second rows, and if it is whole."""
    x, _x_stride, _token_scales, _norm = tokens
    matrix, _scales, _zeros = weight
    my_tokens, is_token, my_columns, is_column = tile
    in_size: tl.constexpr = SHAPE.in_size
    pair_size: tl.constexpr = SHAPE.pair_size
    NUM_SPLITS: tl.constexpr = SHAPE.num_splits
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    if pair_size > 0:
        my_rows = my_columns // pair_size * (2 * pair_size) + my_columns % pair_size
    else:
        my_rows = my_columns
    my_split = tl.program_id(2)
    if SHAPE.prefetched_lines > 0:
        NUM_LINES: tl.constexpr = SHAPE.prefetched_lines
        NUM_STEPS: tl.constexpr = (in_size + SHAPE.block_k - 1) // SHAPE.block_k
        SPLIT: tl.constexpr = (NUM_STEPS + NUM_SPLITS - 1) // NUM_SPLITS * SHAPE.block_k
        row_bytes = in_size if SHAPE.form.code == "float8" else in_size // 2
        if SHAPE.form.code == "":
            row_bytes = in_size * matrix.dtype.element_ty.primitive_bitwidth // 8
        my_lines = my_split * (SPLIT * row_bytes // in_size) // LINE_BYTES
        _prefetch(matrix, my_rows, is_column, my_lines, row_bytes, NUM_LINES)
        if pair_size > 0:
            _prefetch(matrix, my_rows + pair_size, is_column, my_lines, row_bytes, NUM_LINES)
    wait_for_predecessor()
    # Numbers in their own dtype times a norm's weights overflow a float16 sooner than the norm.
    SHRUNK: tl.constexpr = 0.015625 if x.dtype.element_ty == tl.float16 else 1.0
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    is_last = True
    NUM_TURNS: tl.constexpr = 1 if SHAPE.is_shared else NUM_SPLITS
    my_tile = (my_tokens, is_token, my_rows, is_column)
    for turn in range(NUM_TURNS):
        part, second_part, square_part = _split(
            tokens, weight, my_tile, my_split + turn, SHRUNK, SHAPE
        )
        first += part
        second += second_part
        squares += square_part
    if SHAPE.is_shared:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        RECORD: tl.constexpr = 2 * TILE + BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        places = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        my_place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        my_records = partials + my_place.to(tl.int64) * (NUM_SPLITS * RECORD)
        mine = my_records + my_split * RECORD
        tl.store(mine + places, first, mask=is_token[:, None])
        if pair_size > 0:
            tl.store(mine + TILE + places, second, mask=is_token[:, None])
        if SHAPE.has_norm:
            tl.store(mine + 2 * TILE + rows, squares, mask=is_token)
        # All threads have written before the one that counts releases what they wrote.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + my_place, 1, sem="acq_rel") == NUM_SPLITS - 1
        if is_last:
            tl.store(arrivals + my_place, 0)
            first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            # Past L1, which may hold stale values.
            for split in tl.static_range(NUM_SPLITS):
                record = my_records + split * RECORD
                first += tl.load(record + places, is_token[:, None], 0.0, cache_modifier=".cg")
                if pair_size > 0:
                    other = record + TILE + places
                    second += tl.load(other, is_token[:, None], 0.0, cache_modifier=".cg")
                if SHAPE.has_norm:
                    other = record + 2 * TILE + rows
                    squares += tl.load(other, is_token, 0.0, cache_modifier=".cg")
    if is_last:
        if SHAPE.has_norm:
            inverse = tl.rsqrt(squares / in_size + eps) / SHRUNK
            first *= inverse[:, None]
            second *= inverse[:, None]
        if SHAPE.has_bias:
            my_bias = bias + my_rows
            first += tl.load(my_bias, is_column, 0.0).to(tl.float32)[None, :]
            if pair_size > 0:
                second += tl.load(my_bias + pair_size, is_column, 0.0).to(tl.float32)[None, :]
    return first, second, is_last


@triton.jit  # type: ignore[untyped-decorator]
def _split(tokens, weight, tile, split, SHRUNK: tl.constexpr, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    # Both products over the inputs of one split, and the sums of the inputs' squares. The tile has
    # rows of the matrix in place of columns.
    x, x_stride, token_scales, norm = tokens
    matrix, _scales, _zeros = weight
    my_tokens, is_token, my_rows, is_column = tile
    in_size: tl.constexpr = SHAPE.in_size
    FORM: tl.constexpr = SHAPE.form
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_K: tl.constexpr = SHAPE.block_k
    NUM_STEPS: tl.constexpr = (in_size + BLOCK_K - 1) // BLOCK_K
    SPLIT_STEPS: tl.constexpr = (NUM_STEPS + SHAPE.num_splits - 1) // SHAPE.num_splits
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    inputs = tl.arange(0, BLOCK_K)
    my_x = x + my_tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    begin = split * SPLIT_STEPS
    for step in range(begin, tl.minimum(begin + SPLIT_STEPS, NUM_STEPS)):
        k = step * BLOCK_K
        is_input = k + inputs < in_size
        mine = tl.load(my_x + k, mask=is_token[:, None] & is_input[None, :], other=0.0)
        if SHAPE.has_norm:
            wide = mine.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + k + inputs, mask=is_input, other=0.0).to(tl.float32) * SHRUNK
            mine = (wide * scale[None, :]).to(mine.dtype)
        token_scale = 1.0
        if x.dtype.element_ty == tl.float8e4nv:
            my_scales = token_scales + my_tokens.to(tl.int64) * NUM_STEPS + step
            token_scale = tl.load(my_scales, mask=is_token, other=0.0)
        elif matrix.dtype.element_ty == tl.float8e4nv:
            mine, token_scale = as_float8(mine)
        first = add_product(
            first, mine, weight, my_rows, is_column, k, in_size, FORM, BLOCK_K, token_scale
        )
        if SHAPE.pair_size > 0:
            others = my_rows + SHAPE.pair_size
            second = add_product(
                second, mine, weight, others, is_column, k, in_size, FORM, BLOCK_K, token_scale
            )
    return first, second, tl.sum(squares, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(matrix, my_rows, is_row, first_line, row_bytes, NUM_LINES: tl.constexpr):  # type: ignore[no-untyped-def]
    # Asks L2 for the first lines of rows; weights are there before the previous kernel has ended.
    rows = tl.where(is_row, my_rows, 0).to(tl.int64) * row_bytes
    lines = first_line + tl.arange(0, NUM_LINES)
    places = rows[:, None] + tl.minimum(lines * LINE_BYTES, row_bytes - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [matrix.to(tl.int64) + places],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
