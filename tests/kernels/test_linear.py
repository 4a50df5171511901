"""A weight matrix in a CPU's own layout multiplies as the matrix itself does."""

import pytest
import torch

from tandem.kernels.reference import linear
from tandem.kernels.reference.linear import activation_dtype, pack_linear

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Below and above the size from which float32 is laid out anew.
SHAPES = [(24, 40), (320, 192), (768, 768), (1, 7)]


def check(weight: torch.Tensor, num_tokens: int) -> None:
    dtype = activation_dtype(weight)
    x = torch.randn(num_tokens, weight.shape[1]).to(dtype)
    result = pack_linear(weight)(x)
    assert result.dtype == dtype in (torch.float32, weight.dtype)
    expected = x.double() @ weight.double().T
    # Sums of products of about 1 in float32: the rounding of some hundred additions.
    rtol = 0.0 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_are_those_of_the_matrix(
    dtype: torch.dtype, shape: tuple[int, int], num_tokens: int, num_threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check(torch.randn(shape).to(dtype), num_tokens)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [3e38, -(2.0**17), 2.0**-17, -(2.0**-20)])
def test_every_bfloat16_weight_is_kept(value: float) -> None:
    weight = torch.zeros(3, 8, dtype=torch.bfloat16)
    weight[1, 2] = value
    x = torch.zeros(1, 8, dtype=activation_dtype(weight))
    x[0, 2] = 1.0
    assert pack_linear(weight)(x)[0].tolist() == pytest.approx(
        [0.0, weight[1, 2].item(), 0.0], abs=0
    )


def test_weights_that_are_not_finite_stay_so() -> None:
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    weight[2, 3] = float("nan")
    x = torch.ones(1, 8, dtype=activation_dtype(weight))
    assert pack_linear(weight)(x)[0].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cpu_without_a_library_for_it_computes_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_fits_float16", lambda weight: False)
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    check(torch.randn(768, 768).to(dtype), 3)


def test_packing_and_multiplying_warn_of_nothing() -> None:
    # Warnings are errors here, and torch says once that FBGEMM's calls will go.
    torch.set_warn_always(True)
    try:
        pack_linear(torch.ones(8, 8, dtype=torch.bfloat16))
    finally:
        torch.set_warn_always(False)
