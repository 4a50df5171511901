"""Inputs of products of float8 by float8: each 128 of a row are rounded, with their own scale.

The sum of 128 products, which a Hopper adds up with some 14 bits, is multiplied by both scales and
added to the others in float32. For few tokens a product rounds inputs as it reads them. For many
they are rounded before it, as every column of tiles would do so again. The codes are the same.
"""

# In a kernel, a name changes its type.
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.reference.quantized import INPUT_GROUP, LARGEST_FLOAT8, LEAST_MAGNITUDE
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import INTERPRETED, architecture

LEAST_ARCHITECTURE = 89  # with tensor cores for float8
MOST_GROUPS = 32  # of a program
_GROUP = tl.constexpr(INPUT_GROUP)
_LARGEST, _LEAST = tl.constexpr(LARGEST_FLOAT8), tl.constexpr(LEAST_MAGNITUDE)


def has_float8_products() -> bool:
    """Return True where tensor cores multiply float8, and where kernels are interpreted."""
    return architecture() == INTERPRETED or architecture() >= LEAST_ARCHITECTURE


def round_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes of x [num_tokens, in_size], and scales [num_tokens, in_size / 128]."""
    num_tokens, in_size = x.shape
    assert x.stride(1) == 1
    num_groups = cdiv(in_size, INPUT_GROUP)
    codes = torch.empty((num_tokens, in_size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=x.device)
    block = min(MOST_GROUPS, next_power_of_2(num_groups))
    round_inputs_kernel[(num_tokens, cdiv(num_groups, block))](
        x,
        codes,
        scales,
        x.stride(0),
        in_size=in_size,
        num_groups=num_groups,
        BLOCK_GROUPS=block,
        num_warps=4,
        **launch_options(),
    )
    return codes, scales


@triton.jit  # type: ignore[untyped-decorator]
def round_inputs_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, in_size]
    codes,  # [num_tokens, in_size]
    scales,  # [num_tokens, num_groups]
    x_stride,
    in_size: tl.constexpr,
    num_groups: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    # grid: (num_tokens, ceil(num_groups / BLOCK_GROUPS))
    wait_for_predecessor()
    my_token = tl.program_id(0).to(tl.int64)
    my_groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    inputs = my_groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    numbers = tl.load(x + my_token * x_stride + inputs, mask=inputs < in_size, other=0.0)
    my_codes, my_scales = as_float8(numbers)
    tl.store(codes + my_token * in_size + inputs, my_codes, mask=inputs < in_size)
    tl.store(scales + my_token * num_groups + my_groups, my_scales, mask=my_groups < num_groups)


@triton.jit
def as_float8(numbers):  # type: ignore[no-untyped-def]
    """Return codes of numbers [rows, 128], and the scale of each row."""
    wide = numbers.to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(wide), 1), _LEAST) / _LARGEST
    return (wide * (1.0 / scales)[:, None]).to(tl.float8e4nv), scales
