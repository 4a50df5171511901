"""RMSNorm against float64, alone and on top of the residual stream."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tandem.kernels.cpu import launch
from tandem.kernels.layers import norm
from tandem.kernels.reference import norm as reference
from tests.kernels.tolerance import DTYPES, launchers, on_cpu, tolerance

EPS = 1e-6

Launch = Callable[..., None]
rms_norms = launchers("rms_norm", norm.rms_norm, reference.rms_norm, launch.rms_norm)
add_rms_norms = launchers(
    "add_rms_norm", norm.add_rms_norm, reference.add_rms_norm, launch.add_rms_norm
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One column, fewer than a vector, odd, a power of two, several pieces, pieces that don't fill.
WIDTHS = (1, 6, 33, 256, 3584, 5120)


def rows(num_tokens: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random rows within wider ones."""
    generator = torch.Generator().manual_seed(num_tokens + width)
    wide = 3 * torch.randn(num_tokens, width + 3, generator=generator)
    return wide.to(dtype).to(device)[:, 1 : width + 1]


def check(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    x64 = x.double()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    atol = tolerance(out.dtype, 1, float(expected.abs().amax()))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@rms_norms
@dtypes
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_each_row_is_brought_to_unit_size_and_weighed(
    rms_norm: Launch, device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    for width in WIDTHS:
        x, weight = rows(num_tokens, width, dtype, device), rows(1, width, dtype, device)[0]
        before, out = x.clone(), torch.full_like(x, float("nan"))
        rms_norm(x, weight, EPS, out)
        check(x, weight, out)
        assert torch.equal(x, before)
        rms_norm(x, weight, EPS, x)
        assert torch.equal(x, out)


@add_rms_norms
@dtypes
def test_the_sum_is_kept_as_rounded_and_that_is_normed(
    add_rms_norm: Launch, device: str, dtype: torch.dtype
) -> None:
    for width in WIDTHS:
        x, residual = rows(3, width, dtype, device), rows(4, width, dtype, device)[:3]
        weight, total = rows(1, width, dtype, device)[0], residual + x
        out = torch.full_like(x, float("nan"))
        added = residual.clone()
        add_rms_norm(x, added, weight, EPS, out)
        assert torch.equal(added, total)
        check(total, weight, out)
        add_rms_norm(x, residual, weight, EPS, x)
        assert torch.equal(residual, total) and torch.equal(x, out)


@pytest.mark.parametrize("kind", [norm, reference, pytest.param(launch, marks=on_cpu)])
def test_no_tokens_are_no_work(kind: ModuleType, device: str) -> None:
    x, weight = torch.empty(0, 16, device=device), torch.ones(16, device=device)
    kind.rms_norm(x, weight, EPS, x)
    kind.add_rms_norm(x, x.clone(), weight, EPS, x)


@rms_norms
def test_a_row_of_zeros_stays_zero_and_a_huge_one_finite(rms_norm: Launch, device: str) -> None:
    x = torch.zeros(2, 64, dtype=torch.float16, device=device)
    x[1] = 60000.0  # its square is infinite in float16
    out = torch.full_like(x, float("nan"))
    rms_norm(x, torch.ones_like(x[0]), EPS, out)
    assert torch.equal(out, (x > 0).to(x.dtype))


def test_a_row_is_normed_alike_in_every_batch(device: str) -> None:
    x, weight = rows(9, 200, torch.float32, device), rows(1, 200, torch.float32, device)[0]
    together, alone = torch.empty_like(x), torch.empty_like(x[4:5])
    norm.rms_norm(x, weight, EPS, together)
    norm.rms_norm(x[4:5], weight, EPS, alone)
    assert torch.equal(alone[0], together[4])


@pytest.mark.parametrize("hidden_size", [48, 1100])
def test_every_candidate_norms(device: str, hidden_size: int) -> None:
    x = rows(3, hidden_size, torch.float16, device)
    weight = rows(1, hidden_size, torch.float16, device)[0]
    for config in norm.candidates(hidden_size, 2):
        out = torch.full_like(x, float("nan"))
        norm.rms_norm(x, weight, EPS, out, config=config)
        check(x, weight, out)
