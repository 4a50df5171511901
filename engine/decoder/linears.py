"""Multiplications by a weight matrix, and what follows some of them."""

import torch

from tandem.kernels.reference.linear import Linear


def with_bias(linear: Linear, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    """Return `linear` with `bias` [out] added to its results."""
    if bias is None:
        return linear
    addend = bias.to(dtype)
    return lambda x: linear(x).add_(addend)


def scaled(linear: Linear, factor: float) -> Linear:
    """Return `linear` with its results multiplied by `factor`."""
    return linear if factor == 1 else lambda x: linear(x).mul_(factor)


def capped(linear: Linear, cap: float) -> Linear:
    """Return `linear` with each result y turned into cap * tanh(y / cap); cap 0: as it is."""
    return linear if not cap else lambda x: linear(x).div_(cap).tanh_().mul_(cap)
