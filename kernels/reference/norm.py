"""The PyTorch twins of tandem.kernels.norm."""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
) -> None:
    """out = x / rms(x) * weight, in float32 and rounded once."""
    # The weight on its own: torch's rms_norm cannot write to a given tensor.
    torch.mul(F.rms_norm(x.float(), weight.shape, None, eps), weight, out=out)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    residual: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
) -> None:
    """residual += x in place, rounded to its dtype; out is the norm of that rounded sum."""
    rms_norm(residual.add_(x), weight, eps, out)
