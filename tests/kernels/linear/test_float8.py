"""Products of float8 by float8 are those of rounded inputs, in any batch and before any layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton

from tandem.kernels.linear import launch
from tandem.kernels.linear.float8 import round_inputs
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.norm import rms_norm
from tandem.kernels.reference.quantized import QuantizedMatrix, expanded, rounded_inputs
from tandem.kernels.tuned import architecture
from tests.kernels.linear.test_products import make
from tests.kernels.tolerance import DTYPES, UNIT

FORMS = ("float8 in blocks", "float8 by row")
IN_SIZE = 328  # two groups and a part of one

pytestmark = pytest.mark.skipif(0 < architecture() < 89, reason="this GPU does not multiply float8")


@pytest.fixture(autouse=True)
def rounding_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round to float8, half to even; its own carries get lost."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(numbers: Any, given: Any, wanted: Any, rounding_mode: Any) -> Any:
        if str(given) == "fp32" and str(wanted) == "fp8e4nv":
            wide = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(numbers, given, wanted, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def inputs(num_tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of differing sizes, one of zeros; some groups far larger than others."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, IN_SIZE + 4, generator=generator)
    x *= torch.logspace(-3, 0, num_tokens)[:, None]
    x[:, 130:200] *= 8
    x[num_tokens // 2] = 0
    return x.to(dtype).to(device)[:, 2:-2]


def matrix(form: str, device: str, out_size: int = 40) -> QuantizedMatrix:
    return replace(make(form, out_size, IN_SIZE, device=device), rounds_inputs=True)


@pytest.fixture
def num_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give all products so many splits."""
    default = launch.default_config

    def config(*args: int, **shape: int) -> launch.LinearConfig:
        return replace(default(*args, **shape), num_splits=request.param)

    monkeypatch.setattr(launch, "default_config", config)
    yield request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_inputs_are_rounded_as_by_torch(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x = inputs(num_tokens, dtype, device)
    codes, scales = round_inputs(x)
    numbers = codes.float() * scales.repeat_interleave(128, 1)[:, :IN_SIZE]
    exact = rounded_inputs(x)
    # A quotient that is off by float32's last bit is rounded to the other side of a tie.
    assert ((numbers - exact).abs() <= exact.abs() * 2**-3 + 1e-12).all()
    assert ((numbers - exact).abs() <= exact.abs() * 2**-20).float().mean() > 0.99


@pytest.mark.parametrize(
    ("form", "num_splits", "dtype"),
    [
        ("float8 in blocks", 3, torch.float16),
        ("float8 by row", 1, torch.float16),
        pytest.param("float8 in blocks", 1, torch.float32, marks=pytest.mark.slow),
        pytest.param("float8 by row", 3, torch.float32, marks=pytest.mark.slow),
    ],
    indirect=["num_splits"],
)
def test_a_product_is_that_of_rounded_inputs_in_any_batch(
    form: str, dtype: torch.dtype, device: str, num_splits: int
) -> None:
    weight, x = matrix(form, device), inputs(150, dtype, device)
    multiply: Linear = launch.pack_linear(weight)
    product, rounded = multiply(x), rounded_inputs(x).double()
    assert product.dtype == dtype and multiply(x[:0]).shape == (0, 40)
    exact, numbers = rounded @ expanded(weight).double().T, expanded(weight).double()
    # A Hopper's sums of 128 products have 14 bits.
    unit = UNIT[torch.float32] if architecture() != 90 else 2.0**-13
    allowed = IN_SIZE * unit * (rounded.abs() @ numbers.abs().T)
    allowed += UNIT[dtype] * (exact.abs() + allowed)
    assert ((product.double() - exact).abs() <= allowed).all()
    # For few tokens they are rounded as they are read, and splits are shared out.
    for first, end in ((0, 1), (3, 17), (20, 148)):
        assert torch.equal(multiply(x[first:end]), product[first:end])


@pytest.mark.parametrize("form", FORMS)
def test_rounded_inputs_leave_a_product_as_good_as_float8_is(form: str, device: str) -> None:
    weight, x = matrix(form, device), inputs(9, torch.float32, device)
    product = launch.pack_linear(weight)(x).double()
    plain = launch.pack_linear(replace(weight, rounds_inputs=False))(x).double()
    # Half of the last of three bits behind the point is 2^-4.
    assert 0 < float((product - plain).norm() / plain.norm()) < 2**-4


def test_a_norm_an_activation_and_a_residual_are_parts_of_it(device: str) -> None:
    dtype, size = torch.float16, 24
    weight, x = matrix("float8 in blocks", device, 2 * size), inputs(40, dtype, device)
    weight = replace(weight, scales=weight.scales / 256)  # gates that do not overflow
    norm = torch.rand(IN_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    normed = torch.empty_like(x).contiguous()
    rms_norm(x, norm, 1e-6, normed)
    gate, up = launch.multiply(normed, weight).float().chunk(2, 1)
    residual = torch.ones(40, size, dtype=dtype, device=device)
    opened = launch.multiply(
        x, weight, norm=norm, eps=1e-6, activation="silu", residual=residual.clone()
    )
    expected = torch.nn.functional.silu(gate) * up + 1
    # The norm's factor comes after the rounding there, and before it here: some codes differ.
    difference = float((opened.float() - expected).norm() / expected.norm())
    assert difference < 2**-5, difference
