"""A weight matrix in a CPU's own layout multiplies as the matrix itself does."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tandem.kernels.cpu import linear as in_c
from tandem.kernels.cpu.launch import PANEL
from tandem.kernels.reference import linear
from tandem.kernels.reference.linear import Linear, activation_dtype
from tests.kernels.tolerance import UNIT, on_cpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Below and above the size from which float32 is laid out anew, and below and above a panel.
SHAPES = [(24, 40), (320, 192), (768, 768), (1, 7), (PANEL + 1, 258)]

Pack = Callable[[torch.Tensor], Linear]
with_both = pytest.mark.parametrize(
    "pack_linear",
    [
        pytest.param(linear.pack_linear, id="torch"),
        pytest.param(in_c.pack_linear, id="c", marks=on_cpu),
    ],
)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(linear: Linear, weight: torch.Tensor, num_tokens: int) -> None:
    dtype = activation_dtype(weight)
    x = torch.randn(num_tokens, weight.shape[1]).to(dtype)
    result = linear(x)
    assert result.dtype == dtype in (torch.float32, weight.dtype)
    x, weight = x.double(), weight.double()
    expected = x @ weight.T
    # No order of n additions in float32 is further off, and the result is rounded once.
    allowed = x.shape[1] * UNIT[torch.float32] * (x.abs() @ weight.abs().T)
    allowed += UNIT[dtype] * (expected.abs() + allowed)
    assert ((result.double() - expected).abs() <= allowed).all()


@with_both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("num_threads")
def test_products_are_those_of_the_matrix(pack_linear: Pack, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        weight = torch.randn(shape).to(dtype)
        packed = pack_linear(weight)
        for num_tokens in (0, 1, 2, 17, 100):
            check(packed, weight, num_tokens)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("num_threads")
def test_a_token_in_c_has_the_same_product_whatever_it_is_multiplied_with(
    dtype: torch.dtype,
) -> None:
    """To the last bit, from one token to more than a block of them."""
    weight = torch.randn(200, 700).to(dtype)
    if not in_c.is_for_c(weight):
        pytest.skip("this processor does not multiply bfloat16 in C")
    multiply = in_c.pack_linear(weight)
    x = torch.randn(500, 700).to(dtype)
    alone = torch.cat([multiply(token[None]) for token in x])
    for num_tokens in (2, 5, 6, 7, 12, 24, 25, 47, 48, 49, 191, 192, 193, 385, 500):
        assert torch.equal(multiply(x[:num_tokens]), alone[:num_tokens])
        assert torch.equal(multiply(x[-num_tokens:]), alone[-num_tokens:])


@on_cpu
def test_rows_that_lie_apart_are_multiplied_as_they_are() -> None:
    weight, wide = torch.randn(70, 40), torch.randn(9, 100)
    x = wide[:, 20:60]
    assert torch.equal(in_c.pack_linear(weight)(x), in_c.pack_linear(weight)(x.contiguous()))


@with_both
@pytest.mark.parametrize("value", [3e38, -(2.0**17), 2.0**-17, -(2.0**-20)])
def test_every_bfloat16_weight_is_kept(pack_linear: Pack, value: float) -> None:
    weight = torch.zeros(3, 8, dtype=torch.bfloat16)
    weight[1, 2] = value
    x = torch.zeros(1, 8, dtype=activation_dtype(weight))
    x[0, 2] = 1.0
    assert pack_linear(weight)(x)[0].tolist() == pytest.approx(
        [0.0, weight[1, 2].item(), 0.0], abs=0
    )


@with_both
def test_weights_that_are_not_finite_stay_so(pack_linear: Pack) -> None:
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
    weight = torch.randn(768, 768).to(dtype)
    check(linear.pack_linear(weight), weight, 3)


def test_packing_and_multiplying_warn_of_nothing() -> None:
    # Warnings are errors here, and torch says once that FBGEMM's calls will go.
    torch.set_warn_always(True)
    try:
        linear.pack_linear(torch.ones(8, 8, dtype=torch.bfloat16))
    finally:
        torch.set_warn_always(False)
