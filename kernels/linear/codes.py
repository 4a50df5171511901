"""Products with a tile of a matrix that may be stored as codes, which are expanded on the chip."""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from tandem.kernels.reference.quantized import BITS, Code, Matrix

# What `load_numbers` leaves out, to be multiplied into the scales: a power of two.
FACTORS: dict[Code, float] = {"float8": 2.0**8, "int4": 1.0, "float4": 2.0**14}


def stored_parts(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers or codes, scales and zeros; for those that there are none, any tensor."""
    if isinstance(matrix, torch.Tensor):
        assert matrix.is_contiguous()
        return matrix, matrix, matrix
    zeros = matrix.scales if matrix.zeros is None else matrix.zeros
    parts = matrix.codes, matrix.scales, zeros
    assert all(part.is_contiguous() for part in parts)
    return parts


@dataclass(frozen=True, slots=True)
class Form:
    """The constants of a matrix, on which a build depends."""

    code: Code | Literal[""] = ""  # "": numbers, and of no use is the rest
    group_size: int = 0
    num_groups: int = 0
    has_zeros: bool = False
    factor: float = 1.0


def form_of(matrix: Matrix) -> Form:
    """Return the form of a matrix whose codes `load_numbers` expands."""
    if isinstance(matrix, torch.Tensor):
        return Form()
    num_groups, factor = matrix.scales.shape[-1], FACTORS[matrix.code]
    return Form(matrix.code, matrix.group_size, num_groups, matrix.zeros is not None, factor)


def weight_bits(matrix: Matrix) -> int:
    """Return the bits of a stored number or code."""
    if isinstance(matrix, torch.Tensor):
        return 8 * matrix.element_size()
    return BITS[matrix.code]


def step_size(matrix: Matrix, most: int) -> int:
    """Return the inputs of a step, up to `most`, which share a scale."""
    if isinstance(matrix, torch.Tensor) or matrix.scales.shape[-1] == 1:
        return most
    return min(most, matrix.group_size)


@triton.jit  # type: ignore[untyped-decorator]
def load_numbers(  # type: ignore[no-untyped-def]
    codes,  # [rows, in_size], or of 4 bits [rows, in_size / 2]
    my_rows,
    is_row,
    first,
    in_size: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Returns float16 [rows, BLOCK_K] from input `first` on, exact, without zeros and scales.
    if CODE == "float8":
        inputs = first + tl.arange(0, BLOCK_K)
        mask = is_row[:, None] & (inputs < in_size)[None, :]
        mine = codes + my_rows.to(tl.int64)[:, None] * in_size + inputs[None, :]
        bits = tl.load(mine, mask=mask, other=0).to(tl.int16)
        # Sign, exponent and fraction at their places in a float16, whose bias is larger by 8.
        numbers = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    else:
        pairs = first // 2 + tl.arange(0, BLOCK_K // 2)
        mask = is_row[:, None] & (pairs < in_size // 2)[None, :]
        mine = codes + my_rows.to(tl.int64)[:, None] * (in_size // 2) + pairs[None, :]
        both = tl.load(mine, mask=mask, other=0)
        bits = tl.interleave(both & 15, both >> 4).to(tl.int16)
        if CODE == "int4":
            numbers = (bits - 8).to(tl.float16)
        else:
            # The same of a float4, whose bias is smaller by 14.
            numbers = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def add_product(  # type: ignore[no-untyped-def]
    total,  # [BLOCK_M, columns] float32
    tokens,  # [BLOCK_M, BLOCK_K] from input `first` on
    weight,  # matrix [rows, in_size], or of 4 bits [rows, in_size / 2], scales and zeros by group
    my_rows,
    is_row,
    first,
    in_size: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    token_scale=1.0,  # [BLOCK_M] where tokens and matrix are of float8
):
    # Returns total + tokens times rows of the matrix; BLOCK_K divides the group size.
    matrix, scales, zeros = weight
    CODE: tl.constexpr = FORM.code
    IS_FLOAT8: tl.constexpr = matrix.dtype.element_ty == tl.float8e4nv
    if CODE == "" or IS_FLOAT8:
        inputs = first + tl.arange(0, BLOCK_K)
        mine = matrix + my_rows.to(tl.int64)[None, :] * in_size + inputs[:, None]
        mask = is_row[None, :] & (inputs < in_size)[:, None]
        columns = tl.load(mine, mask=mask, other=0.0)
    if CODE == "":
        total = tl.dot(tokens, columns, total, input_precision="ieee")
    else:  # a build compiles what follows a return, too
        my_groups = my_rows.to(tl.int64) * FORM.num_groups + first // FORM.group_size
        if IS_FLOAT8:
            part = tl.dot(tokens, columns) * token_scale[:, None]
        else:
            numbers = load_numbers(matrix, my_rows, is_row, first, in_size, CODE, BLOCK_K)
            if FORM.has_zeros:
                zero = tl.load(zeros + my_groups, mask=is_row, other=0.0)
                numbers -= zero.to(tl.float16)[:, None]
            part = tl.dot(tokens, tl.trans(numbers.to(tokens.dtype)), input_precision="ieee")
        scale = tl.load(scales + my_groups, mask=is_row, other=0.0).to(tl.float32)
        total += part * (scale * FORM.factor)[None, :]
    return total
