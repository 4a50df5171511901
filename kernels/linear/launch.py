"""Multiplication by a weight matrix on a GPU: numbers by cuBLAS or in one order of sums, codes."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton

from tandem.kernels.linear.codes import code_options, step_size, stored_parts, weight_bits
from tandem.kernels.linear.products import linear_kernel
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import Matrix
from tandem.kernels.tuned import tuned_config


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A program's tile of tokens by outputs, and the inputs of one step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def default_config(element_bytes: int) -> LinearConfig:
    """Return one shape of tiles for any number of tokens: sums run in one order in every batch."""
    if element_bytes == 4:
        return LinearConfig(16, 32, 32, 4, 2)
    return LinearConfig(64, 64, 64, 4, 3)


def pack_linear(weight: Matrix) -> Linear:
    """Return `x @ weight.T`; `weight` is [out, in], and read as it is. Numbers are cuBLAS's."""
    if isinstance(weight, torch.Tensor):
        return partial(F.linear, weight=weight)
    return pack_linear_in_order(weight)


def pack_linear_in_order(weight: Matrix) -> Linear:
    """Return `x @ weight.T`, in which a row has the same bits in every batch.

    Codes are exact in the dtype of x; each group's sum, in float32, is multiplied by its scale.
    """
    return partial(_compute, weight=weight)


def _compute(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    (num_tokens, in_size), (out_size, _) = x.shape, weight.shape
    out = torch.empty((num_tokens, out_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    assert x.stride(1) == 1
    shape = {"in_size": in_size, "out_size": out_size, "bits": weight_bits(weight)}
    default = default_config(x.element_size())
    config = tuned_config(default, "linear", **shape, element_bytes=x.element_size())
    grid = triton.cdiv(out_size, config.block_n), triton.cdiv(num_tokens, config.block_m)
    linear_kernel[grid](
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
