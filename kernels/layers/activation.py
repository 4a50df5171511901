"""SiLU or GELU of a feed-forward layer's gate, times its up projection."""

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
class SiluMulConfig:
    """`block_width` columns of one token per program."""

    block_width: int
    num_warps: int


def silu_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size], gates first
    out: torch.Tensor,  # [num_tokens, intermediate_size], no part of gate_up
    *,
    config: SiluMulConfig | None = None,
) -> None:
    """Compute out = silu(gate) * up, in float32 and rounded once."""
    _launch(gate_up, out, config)


def gelu_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size], gates first
    out: torch.Tensor,  # [num_tokens, intermediate_size], no part of gate_up
) -> None:
    """Compute out = gelu(gate) * up with GELU by tanh, in float32 and rounded once."""
    _launch(gate_up, out, None, is_gelu=True)


def _launch(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    config: SiluMulConfig | None,
    *,
    is_gelu: bool = False,
) -> None:
    num_tokens, intermediate_size = out.shape
    if num_tokens == 0:
        return
    assert gate_up.shape == (num_tokens, 2 * intermediate_size) and gate_up.dtype == out.dtype
    assert gate_up.stride(1) == 1 and out.stride(1) == 1
    if config is None:
        programs = 4 * num_multiprocessors(out.device)
        few = num_tokens * cdiv(intermediate_size, 2048) < programs
        shape = {"intermediate_size": intermediate_size, "element_bytes": out.element_size()}
        config = tuned_config(
            default_config(few, **shape), "silu_mul", few_tokens=int(few), **shape
        )
    num_pieces = cdiv(intermediate_size, config.block_width)
    _silu_mul_kernel[(num_tokens * num_pieces,)](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        intermediate_size=intermediate_size,
        IS_GELU=is_gelu,
        NUM_PIECES=num_pieces,
        BLOCK_WIDTH=config.block_width,
        num_warps=config.num_warps,
        **launch_options(),
    )


@cache
def default_config(few_tokens: bool, intermediate_size: int, element_bytes: int) -> SiluMulConfig:
    """Return a vector of gate and one of up per thread; smaller programs for few tokens.

    With two each, the compiler loads the last only once the others are in use.
    """
    num_warps = 2 if few_tokens else 8
    block_width = num_warps * WARP * VECTOR_BYTES // element_bytes
    return SiluMulConfig(min(block_width, next_power_of_2(intermediate_size)), num_warps)


def candidates(intermediate_size: int, element_bytes: int) -> Iterator[SiluMulConfig]:
    """Yield the configurations worth measuring: one to four vectors each of gate and up."""
    for num_warps in (1, 2, 4, 8, 16):
        for num_vectors in (1, 2, 4):
            block_width = num_vectors * num_warps * WARP * VECTOR_BYTES // element_bytes
            if block_width < 2 * intermediate_size:
                yield SiluMulConfig(block_width, num_warps)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [num_tokens, 2 * intermediate_size]
    out,  # [num_tokens, intermediate_size]
    gate_up_stride,
    out_stride,
    intermediate_size: tl.constexpr,
    IS_GELU: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # grid: (num_tokens * NUM_PIECES,), the pieces of a token side by side
    my_token = (tl.program_id(0) // NUM_PIECES).to(tl.int64)
    my_columns = tl.program_id(0) % NUM_PIECES * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = my_columns < intermediate_size
    my_gate = gate_up + my_token * gate_up_stride + my_columns
    wait_for_predecessor()
    gate = tl.load(my_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(my_gate + intermediate_size, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        # x (1 + tanh(u)) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        opened = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        opened = gate / (1.0 + tl.exp(-gate))
    my_out = out + my_token * out_stride + my_columns
    tl.store(my_out, (opened * up).to(out.dtype.element_ty), mask=mask)
