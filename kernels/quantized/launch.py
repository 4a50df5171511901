"""Multiplication by a weight matrix on a GPU, of numbers or stored as codes."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton

from tandem.kernels.quantized.codes import code_options, step_size, stored_parts
from tandem.kernels.quantized.products import quantized_linear_kernel
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import BITS, Matrix, QuantizedMatrix
from tandem.kernels.tuned import tuned_config


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """A program's tile of tokens by outputs, and the inputs of one step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def default_config(element_bytes: int) -> QuantizedConfig:
    """Return one shape of tiles for any number of tokens: sums run in one order in every batch."""
    if element_bytes == 4:
        return QuantizedConfig(16, 32, 32, 4, 2)
    return QuantizedConfig(64, 64, 64, 4, 3)


def pack_linear(weight: Matrix) -> Linear:
    """Return `x @ weight.T`; `weight` is [out, in], and read as it is.

    Codes are exact in the dtype of x; each group's sum, in float32, is multiplied by its scale.
    """
    if isinstance(weight, torch.Tensor):
        return partial(F.linear, weight=weight)
    return partial(_compute, weight=weight)


def _compute(x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    (num_tokens, in_size), (out_size, _) = x.shape, weight.shape
    out = torch.empty((num_tokens, out_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    assert x.stride(1) == 1
    shape = {"in_size": in_size, "out_size": out_size, "bits": BITS[weight.code]}
    default = default_config(x.element_size())
    config = tuned_config(default, "quantized", **shape, element_bytes=x.element_size())
    grid = triton.cdiv(out_size, config.block_n), triton.cdiv(num_tokens, config.block_m)
    quantized_linear_kernel[grid](
        x,
        *stored_parts(weight),
        out,
        num_tokens,
        x.stride(0),
        in_size=in_size,
        out_size=out_size,
        **code_options(weight),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=step_size(weight, config.block_k),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
