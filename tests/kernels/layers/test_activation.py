"""SiLU or GELU times up against float64."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tandem.kernels.cpu import launch
from tandem.kernels.layers import activation
from tandem.kernels.reference import activation as reference
from tests.kernels.tolerance import DTYPES, launchers, tolerance

kinds = launchers("silu_mul", activation.silu_mul, reference.silu_mul, launch.silu_mul)

gelu_launchers = launchers("gelu_mul", activation.gelu_mul, reference.gelu_mul, launch.gelu_mul)


def inputs(num_tokens: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random gates and ups within wider rows."""
    generator = torch.Generator().manual_seed(num_tokens + width)
    wide = 4 * torch.randn(num_tokens, 2 * width + 3, generator=generator)
    return wide.to(dtype).to(device)[:, 1 : 2 * width + 1]


def check(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    # The reference rounds the gate as well, the kernel at the end only.
    atol = tolerance(out.dtype, 2, float(expected.abs().amax()))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_scales_the_up_projection(
    silu_mul: Callable[..., None], device: str, dtype: torch.dtype
) -> None:
    for width, num_tokens in product((1, 8, 37, 512, 1160, 4736), (1, 7)):
        gate_up = inputs(num_tokens, width, dtype, device)
        before = gate_up.clone()
        out = torch.full((num_tokens, width + 1), float("nan"), dtype=dtype, device=device)
        silu_mul(gate_up, out[:, :width])
        check(gate_up, out[:, :width])
        assert torch.equal(gate_up, before) and out[:, width].isnan().all()


# NumPy's, under the interpreter: exp() may be infinite, the gate is divided by it.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@kinds
def test_gates_far_from_zero_stay_finite(silu_mul: Callable[..., None], device: str) -> None:
    gates = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]], device=device)
    out = torch.full_like(gates, float("nan"))
    silu_mul(torch.cat([gates, torch.ones_like(gates)], 1), out)
    torch.testing.assert_close(out, gates.clamp(min=0.0))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@gelu_launchers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_opens_the_gate_by_tanh(
    gelu_mul: Callable[..., None], device: str, dtype: torch.dtype
) -> None:
    for width in (1, 37, 1160):
        gate_up = inputs(7, width, dtype, device)
        gate, up = gate_up.double().chunk(2, dim=1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        out = torch.full((7, width), float("nan"), dtype=dtype, device=device)
        gelu_mul(gate_up, out)
        atol = tolerance(dtype, 2, float(expected.abs().amax()))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@gelu_launchers
def test_gelu_gates_far_from_zero_stay_finite(gelu_mul: Callable[..., None], device: str) -> None:
    gates = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]], device=device)
    out = torch.full_like(gates, float("nan"))
    gelu_mul(torch.cat([gates, torch.ones_like(gates)], 1), out)
    torch.testing.assert_close(out, gates.clamp(min=0.0))


@kinds
def test_no_tokens_are_no_work(silu_mul: Callable[..., None], device: str) -> None:
    silu_mul(torch.empty(0, 32, device=device), torch.empty(0, 16, device=device))


def test_every_candidate_computes_the_same(device: str) -> None:
    gate_up = inputs(2, 1160, torch.float16, device)
    expected = torch.empty(2, 1160, dtype=torch.float16, device=device)
    activation.silu_mul(gate_up, expected)
    for config in activation.candidates(1160, 2):
        out = torch.full_like(expected, float("nan"))
        activation.silu_mul(gate_up, out, config=config)
        assert torch.equal(out, expected)
