"""SiLU or GELU times up against float64."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import gelu, silu

from tandem.kernels.cpu import launch
from tandem.kernels.layers import activation
from tandem.kernels.reference import activation as reference
from tests.kernels.tolerance import DTYPES, on_cpu, tolerance


class Kind(NamedTuple):
    """A kernel, and the function that it computes of the gate."""

    multiply: Callable[..., None]
    opened: Callable[[torch.Tensor], torch.Tensor]


kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            Kind(getattr(module, name), opened),
            id=f"{name} {module.__name__}",
            marks=on_cpu if module is launch else (),
        )
        for name, opened in (("silu_mul", silu), ("gelu_mul", partial(gelu, approximate="tanh")))
        for module in (activation, reference, launch)
    ],
)


def inputs(num_tokens: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random gates and ups within wider rows."""
    generator = torch.Generator().manual_seed(num_tokens + width)
    wide = 4 * torch.randn(num_tokens, 2 * width + 3, generator=generator)
    return wide.to(dtype).to(device)[:, 1 : 2 * width + 1]


# NumPy's, under the interpreter: exp() may be infinite, the gate is divided by it.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_opened_gate_scales_the_up_projection(
    kind: Kind, device: str, dtype: torch.dtype
) -> None:
    for width, num_tokens in ((1, 1), (37, 7), (512, 1), (1160, 3), (4736, 1)):
        gate_up = inputs(num_tokens, width, dtype, device)
        before = gate_up.clone()
        out = torch.full((num_tokens, width + 1), float("nan"), dtype=dtype, device=device)
        kind.multiply(gate_up, out[:, :width])
        gate, up = gate_up.double().chunk(2, dim=1)
        expected = kind.opened(gate) * up
        # The reference rounds the gate as well, the kernel at the end only.
        atol = tolerance(dtype, 2, float(expected.abs().amax()))
        torch.testing.assert_close(out[:, :width].double(), expected, rtol=0, atol=atol)
        assert torch.equal(gate_up, before) and out[:, width].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@kinds
def test_gates_far_from_zero_stay_finite(kind: Kind, device: str) -> None:
    gates = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]], device=device)
    out = torch.full_like(gates, float("nan"))
    kind.multiply(torch.cat([gates, torch.ones_like(gates)], 1), out)
    torch.testing.assert_close(out, gates.clamp(min=0.0))


@kinds
def test_no_tokens_are_no_work(kind: Kind, device: str) -> None:
    kind.multiply(torch.empty(0, 32, device=device), torch.empty(0, 16, device=device))


def test_every_candidate_computes_the_same(device: str) -> None:
    gate_up = inputs(2, 1160, torch.float16, device)
    expected = torch.empty(2, 1160, dtype=torch.float16, device=device)
    activation.silu_mul(gate_up, expected)
    for config in activation.candidates(1160, 2):
        out = torch.full_like(expected, float("nan"))
        activation.silu_mul(gate_up, out, config=config)
        assert torch.equal(out, expected)
