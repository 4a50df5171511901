"""Tokens times a weight matrix, of numbers or stored as codes, in one order of sums.

The inputs are cut into splits; a row's sums are those of the splits, added in their order. For few
tokens each split is a program's, and the last one of a tile adds them up; for many, one program
computes all splits of its tile. The bits are the same. A norm of the tokens, and what is done with
the results, are parts of the kernel.
"""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor
from tandem.kernels.linear.codes import add_product
from tandem.kernels.linear.float8 import as_float8

LINE_BYTES = tl.constexpr(128)  # of the L2 cache


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, in_size], rounded to float8 where the matrix is of it, if it is not yet
    token_scales,  # [num_tokens, ceil(in_size / 128)] where x is of float8
    norm,  # [in_size] where HAS_NORM
    matrix,  # [num_rows, in_size], or of codes of 4 bits [num_rows, in_size / 2]
    scales,  # [num_rows, num_groups]
    zeros,  # [num_rows, num_groups]
    bias,  # [num_rows] where HAS_BIAS
    partials,  # of each tile and split a record, where IS_SHARED
    arrivals,  # [num_tiles] splits finished, zero between launches
    out,  # [num_tokens, out_size]
    num_tokens,
    x_stride,
    eps,
    in_size: tl.constexpr,
    out_size: tl.constexpr,
    group_size: tl.constexpr,
    num_groups: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu" or "gelu" of the first out_size rows, times the others; ""
    ADDS: tl.constexpr,  # to what is in out
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    PREFETCHED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(out_size / BLOCK_N), ceil(num_tokens / BLOCK_M), NUM_SPLITS if IS_SHARED else 1)
    my_tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    my_columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_column = my_tokens < num_tokens, my_columns < out_size
    first, second, is_last = multiplied(
        x,
        token_scales,
        norm,
        matrix,
        scales,
        zeros,
        bias,
        partials,
        arrivals,
        my_tokens,
        is_token,
        my_columns,
        is_column,
        x_stride,
        eps,
        in_size,
        out_size,
        group_size,
        num_groups,
        ACTIVATION != "",
        HAS_NORM,
        HAS_BIAS,
        CODE,
        HAS_ZEROS,
        FACTOR,
        NUM_SPLITS,
        IS_SHARED,
        PREFETCHED,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
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
def multiplied(  # type: ignore[no-untyped-def]
    x,
    token_scales,
    norm,
    matrix,
    scales,
    zeros,
    bias,
    partials,
    arrivals,
    my_tokens,
    is_token,
    my_columns,
    is_column,
    x_stride,
    eps,
    in_size: tl.constexpr,
    pair_size: tl.constexpr,  # column c of each 2 * pair_size rows has row c, and row c + pair_size
    group_size: tl.constexpr,
    num_groups: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    PREFETCHED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The program's tile [BLOCK_M, BLOCK_N], that of the pairs' second rows, and if it is whole."""
    if IS_PAIRED:
        my_rows = my_columns // pair_size * (2 * pair_size) + my_columns % pair_size
    else:
        my_rows = my_columns
    my_split = tl.program_id(2)
    if PREFETCHED:
        NUM_STEPS: tl.constexpr = (in_size + BLOCK_K - 1) // BLOCK_K
        SPLIT: tl.constexpr = (NUM_STEPS + NUM_SPLITS - 1) // NUM_SPLITS * BLOCK_K
        row_bytes = in_size if CODE == "float8" else in_size // 2
        if CODE == "":
            row_bytes = in_size * matrix.dtype.element_ty.primitive_bitwidth // 8
        my_lines = my_split * (SPLIT * row_bytes // in_size) // LINE_BYTES
        _prefetch(matrix, my_rows, is_column, my_lines, row_bytes, PREFETCHED)
        if IS_PAIRED:
            _prefetch(matrix, my_rows + pair_size, is_column, my_lines, row_bytes, PREFETCHED)
    wait_for_predecessor()
    # Numbers in their own dtype times a norm's weights overflow a float16 sooner than the norm.
    SHRUNK: tl.constexpr = 0.015625 if x.dtype.element_ty == tl.float16 else 1.0
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    is_last = True
    NUM_TURNS: tl.constexpr = 1 if IS_SHARED else NUM_SPLITS
    for turn in range(NUM_TURNS):
        part, second_part, square_part = _split(
            x,
            token_scales,
            norm,
            matrix,
            scales,
            zeros,
            my_tokens,
            is_token,
            my_rows,
            is_column,
            my_split + turn,
            x_stride,
            in_size,
            pair_size,
            group_size,
            num_groups,
            IS_PAIRED,
            HAS_NORM,
            SHRUNK,
            CODE,
            HAS_ZEROS,
            FACTOR,
            NUM_SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        first += part
        second += second_part
        squares += square_part
    if IS_SHARED:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        RECORD: tl.constexpr = 2 * TILE + BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        places = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        my_tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        my_records = partials + my_tile.to(tl.int64) * (NUM_SPLITS * RECORD)
        mine = my_records + my_split * RECORD
        tl.store(mine + places, first, mask=is_token[:, None])
        if IS_PAIRED:
            tl.store(mine + TILE + places, second, mask=is_token[:, None])
        if HAS_NORM:
            tl.store(mine + 2 * TILE + rows, squares, mask=is_token)
        # All threads have written before the one that counts releases what they wrote.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + my_tile, 1, sem="acq_rel") == NUM_SPLITS - 1
        if is_last:
            tl.store(arrivals + my_tile, 0)
            first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            # Past L1, which may hold stale values.
            for split in tl.static_range(NUM_SPLITS):
                record = my_records + split * RECORD
                first += tl.load(record + places, is_token[:, None], 0.0, cache_modifier=".cg")
                if IS_PAIRED:
                    other = record + TILE + places
                    second += tl.load(other, is_token[:, None], 0.0, cache_modifier=".cg")
                if HAS_NORM:
                    other = record + 2 * TILE + rows
                    squares += tl.load(other, is_token, 0.0, cache_modifier=".cg")
    if is_last:
        if HAS_NORM:
            inverse = tl.rsqrt(squares / in_size + eps) / SHRUNK
            first *= inverse[:, None]
            second *= inverse[:, None]
        if HAS_BIAS:
            my_bias = bias + my_rows
            first += tl.load(my_bias, is_column, 0.0).to(tl.float32)[None, :]
            if IS_PAIRED:
                second += tl.load(my_bias + pair_size, is_column, 0.0).to(tl.float32)[None, :]
    return first, second, is_last


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    x,
    token_scales,
    norm,
    matrix,
    scales,
    zeros,
    my_tokens,
    is_token,
    my_rows,
    is_column,
    split,
    x_stride,
    in_size: tl.constexpr,
    pair_size: tl.constexpr,
    group_size: tl.constexpr,
    num_groups: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SHRUNK: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Both products over the inputs of one split, and the sums of the inputs' squares.
    NUM_STEPS: tl.constexpr = (in_size + BLOCK_K - 1) // BLOCK_K
    SPLIT_STEPS: tl.constexpr = (NUM_STEPS + NUM_SPLITS - 1) // NUM_SPLITS
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    inputs = tl.arange(0, BLOCK_K)
    my_x = x + my_tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    begin = split * SPLIT_STEPS
    for step in range(begin, tl.minimum(begin + SPLIT_STEPS, NUM_STEPS)):
        k = step * BLOCK_K
        is_input = k + inputs < in_size
        tokens = tl.load(my_x + k, mask=is_token[:, None] & is_input[None, :], other=0.0)
        if HAS_NORM:
            wide = tokens.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + k + inputs, mask=is_input, other=0.0).to(tl.float32) * SHRUNK
            tokens = (wide * scale[None, :]).to(tokens.dtype)
        token_scale = 1.0
        if x.dtype.element_ty == tl.float8e4nv:
            my_scales = token_scales + my_tokens.to(tl.int64) * NUM_STEPS + step
            token_scale = tl.load(my_scales, mask=is_token, other=0.0)
        elif matrix.dtype.element_ty == tl.float8e4nv:
            tokens, token_scale = as_float8(tokens)
        first = add_product(
            first,
            tokens,
            matrix,
            scales,
            zeros,
            my_rows,
            is_column,
            k,
            in_size,
            group_size,
            num_groups,
            CODE,
            HAS_ZEROS,
            FACTOR,
            BLOCK_K,
            token_scale,
        )
        if IS_PAIRED:
            second = add_product(
                second,
                tokens,
                matrix,
                scales,
                zeros,
                my_rows + pair_size,
                is_column,
                k,
                in_size,
                group_size,
                num_groups,
                CODE,
                HAS_ZEROS,
                FACTOR,
                BLOCK_K,
                token_scale,
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
