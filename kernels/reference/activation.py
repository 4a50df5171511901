"""The PyTorch reference implementations of tandem.kernels.layers.activation."""

import torch


def silu_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size], gates first
    out: torch.Tensor,  # [num_tokens, intermediate_size], no part of gate_up
) -> None:
    """Compute out = silu(gate) * up; silu(gate) is rounded to its dtype before the product."""
    gate, up = gate_up.split_with_sizes([out.shape[1], out.shape[1]], 1)
    # torch.nn.functional.silu() is this, but cannot write to a given tensor.
    torch._C._nn.silu(gate, out=out).mul_(up)  # type: ignore[call-arg]


def gelu_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size], gates first
    out: torch.Tensor,  # [num_tokens, intermediate_size], no part of gate_up
) -> None:
    """Compute out = gelu(gate) * up with GELU by tanh, rounded to its dtype before the product."""
    gate, up = gate_up.split_with_sizes([out.shape[1], out.shape[1]], 1)
    torch._C._nn.gelu(gate, approximate="tanh", out=out).mul_(up)  # type: ignore[call-arg]
