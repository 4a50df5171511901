"""The PyTorch reference implementations of tandem.kernels.layers.norm."""

from functools import lru_cache

import torch


@lru_cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """[1]"""
    return torch.full((1,), value, device=device)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return [..., 1], 1 / sqrt(mean of squares + eps) over the last dimension of float32 `x`.

    One pass over x: torch's rms_norm takes several, each with a tensor of x's size between.
    """
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    squares = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1])
    return squares.rsqrt_()


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
) -> None:
    """Compute out = x / rms(x) * weight, in float32 and rounded once."""
    wide = x.float()
    scale = inverse_rms(wide, eps)
    if out.dtype == torch.float32:
        torch.mul(wide, scale, out=out).mul_(weight)
    else:
        torch.mul(wide * scale, weight, out=out)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    residual: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
) -> None:
    """Add x to residual in place, rounded to its dtype; out is the norm of that rounded sum."""
    rms_norm(residual.add_(x), weight, eps, out)
