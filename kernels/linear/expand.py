"""Matrices of codes as numbers, a part at a time, for a library that multiplies numbers."""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.linear.codes import form_of, load_numbers, step_size, stored_parts
from tandem.kernels.reference.quantized import QuantizedMatrix
from tandem.kernels.sizes import cdiv, next_power_of_2

MOST_PART_BYTES = 32 << 20  # which the L2 cache of a large chip holds
BLOCK_ROWS, MOST_INPUTS = 32, 128


def expanded_parts(matrix: QuantizedMatrix, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the rows of a matrix [out, in], rounded to `dtype`; each part overwrites the last."""
    num_rows, in_size = matrix.shape
    num_parts = cdiv(num_rows * in_size * dtype.itemsize, MOST_PART_BYTES)
    most_rows = cdiv(num_rows, num_parts)
    codes, scales, zeros = stored_parts(matrix)
    whole = torch.empty((most_rows, in_size), dtype=dtype, device=matrix.device)
    block = min(step_size(matrix, MOST_INPUTS), next_power_of_2(in_size))
    for first in range(0, num_rows, most_rows):
        part = whole[: num_rows - first]
        expand_kernel[(cdiv(len(part), BLOCK_ROWS), cdiv(in_size, block))](
            codes,
            scales,
            zeros,
            part,
            first,
            len(part),
            in_size=in_size,
            FORM=form_of(matrix),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_K=block,
            num_warps=4,
            **launch_options(),
        )
        yield part


@triton.jit(do_not_specialize=["first_row", "num_rows"])  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    codes,  # [all rows, in_size], or of codes of 4 bits [all rows, in_size / 2]
    scales,  # [all rows, num_groups]
    zeros,  # [all rows, num_groups]
    out,  # [num_rows, in_size]
    first_row,
    num_rows,
    in_size: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # which divides the group size
):
    # grid: (ceil(num_rows / BLOCK_ROWS), ceil(in_size / BLOCK_K))
    wait_for_predecessor()
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    my_rows = first_row + rows
    first = tl.program_id(1) * BLOCK_K
    CODE: tl.constexpr = FORM.code
    numbers = load_numbers(codes, my_rows, is_row, first, in_size, CODE, BLOCK_K)
    my_groups = my_rows.to(tl.int64) * FORM.num_groups + first // FORM.group_size
    if FORM.has_zeros:
        zero = tl.load(zeros + my_groups, mask=is_row, other=0.0)
        numbers -= zero.to(tl.float16)[:, None]
    scale = tl.load(scales + my_groups, mask=is_row, other=0.0).to(tl.float32) * FORM.factor
    inputs = first + tl.arange(0, BLOCK_K)
    my_out = out + rows.to(tl.int64)[:, None] * in_size + inputs[None, :]
    wide = numbers.to(tl.float32) * scale[:, None]
    mask = is_row[:, None] & (inputs < in_size)[None, :]
    tl.store(my_out, wide.to(out.dtype.element_ty), mask=mask)
