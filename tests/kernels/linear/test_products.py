"""Products in one order of sums; those with codes are those with the numbers they stand for."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tandem.kernels.cpu import experts as experts_in_c
from tandem.kernels.cpu import linear as linear_in_c
from tandem.kernels.experts import launch as experts_in_triton
from tandem.kernels.linear import expand, launch
from tandem.kernels.reference import experts as reference_experts
from tandem.kernels.reference import linear as reference
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.quantized import Code, QuantizedMatrix, expanded
from tests.kernels.tolerance import DTYPES, UNIT, launchers, on_cpu

# (code, group size, dtype of scales, has zeros)
FORMS: dict[str, tuple[Code, int, torch.dtype, bool]] = {
    "float8 in blocks": ("float8", 128, torch.float32, False),
    "float8 by row": ("float8", 1000, torch.bfloat16, False),
    "int4": ("int4", 64, torch.float16, False),
    "int4 with zeros": ("int4", 32, torch.bfloat16, True),
    "int4 by row": ("int4", 1000, torch.float16, True),
    "float4": ("float4", 32, torch.bfloat16, False),
}
forms = pytest.mark.parametrize("form", FORMS)


def make(form: str, *shape: int, device: str = "cpu") -> QuantizedMatrix:
    """Random codes, every one of the finite numbers among them."""
    code, group_size, dtype, has_zeros = FORMS[form]
    *outer, in_size = shape
    generator = torch.Generator().manual_seed(in_size)
    width = in_size if code == "float8" else in_size // 2
    codes = torch.randint(256, (*outer, width), dtype=torch.uint8, generator=generator)
    if code == "float8":
        codes[(codes & 127) == 127] = 3
    num_groups = -(-in_size // group_size)
    # Some scales are powers of two far apart, as those of MXFP4 may be.
    scales = 2.0 ** torch.randint(-9, 2, (*outer, num_groups), generator=generator)
    if code != "float4":
        scales *= 1 + torch.rand(scales.shape, generator=generator)
    zeros = torch.randint(-8, 9, scales.shape, generator=generator) if has_zeros else None
    return QuantizedMatrix(
        code,
        codes.to(device),
        scales.to(dtype).to(device),
        group_size,
        None if zeros is None else zeros.to(dtype).to(device),
    )


@pytest.mark.parametrize(
    ("code", "codes", "numbers"),
    [
        ("float8", [0x00, 0x80, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE], [0, 0, 2**-9, 7 * 2**-9]),
        ("int4", [0x80, 0x17], [-8, 0, -1, -7]),
        ("float4", [0x10, 0xF9], [0, 0.5, -0.5, -6]),
    ],
)
def test_codes_stand_for_these_numbers(code: Code, codes: list[int], numbers: list[float]) -> None:
    more = [2**-6, 1, 448, -448] if code == "float8" else []
    stored = torch.tensor([codes], dtype=torch.uint8)
    matrix = QuantizedMatrix(code, stored, torch.tensor([[2.0]]), 8)
    assert expanded(matrix).tolist() == [[2 * number for number in numbers + more]]
    if code == "int4":
        moved = replace(matrix, zeros=torch.tensor([[3.0]]))
        assert expanded(moved).tolist() == [[2 * (number - 3) for number in numbers]]


@on_cpu
@forms
@pytest.mark.parametrize("shape", [(1, 8), (200, 328), (64, 64)], ids=str)
def test_in_c_a_product_is_that_of_the_numbers_to_the_last_bit(
    form: str, shape: tuple[int, int]
) -> None:
    matrix = make(form, *shape)
    multiply, exact = (linear_in_c.pack_linear(each) for each in (matrix, expanded(matrix)))
    for num_tokens in (0, 1, 4, 5, 30, 400):
        x = torch.randn(num_tokens, shape[1] + 4)[:, 2:-2]
        assert torch.equal(multiply(x), exact(x.contiguous()))
        half = x.bfloat16()
        assert torch.equal(multiply(half), multiply(half.float()).bfloat16())


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, DTYPES[-1]) for form in FORMS), ("int4 with zeros", torch.float32)],
)
def test_in_triton_a_product_is_that_of_the_numbers(
    form: str, dtype: torch.dtype, device: str
) -> None:
    matrix = make(form, 40, 168, device=device)
    x = torch.randn(17, 172, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    x = x[:, 2:-2]
    product = launch.pack_linear(matrix)(x)
    assert product.dtype == dtype and launch.pack_linear(matrix)(x[:0]).shape == (0, 40)
    exact, weight = x.double() @ expanded(matrix).double().T, expanded(matrix).double()
    allowed = 168 * UNIT[torch.float32] * (x.double().abs() @ weight.abs().T)
    allowed += UNIT[dtype] * (exact.abs() + allowed)
    assert ((product.double() - exact).abs() <= allowed).all()
    # In any batch the same bits.
    for first, end in ((0, 1), (3, 17)):
        assert torch.equal(launch.pack_linear(matrix)(x[first:end]), product[first:end])


@forms
def test_for_many_tokens_codes_are_expanded_before_the_product(
    form: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LEAST_EXPANDED_TOKENS", 6)
    monkeypatch.setattr(expand, "MOST_PART_BYTES", 4 * 168 * 20)  # of 20 rows
    matrix = make(form, 53, 168, device=device)
    parts = [part.clone() for part in expand.expanded_parts(matrix, torch.float32)]
    assert [len(part) for part in parts] == [18, 18, 17]
    assert torch.equal(torch.cat(parts), expanded(matrix))
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(6, 168, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
        product = launch.pack_linear(matrix)(x)
        exact, sizes = x.double() @ expanded(matrix).double().T, expanded(matrix).double().abs()
        allowed = (168 * UNIT[torch.float32] + UNIT[dtype]) * (x.double().abs() @ sizes.T)
        allowed += UNIT[dtype] * (exact.abs() + allowed)
        assert ((product.double() - exact).abs() <= allowed).all()
    monkeypatch.setattr(launch, "multiply", lambda x, weight: x[:, :0])
    assert launch.pack_linear(matrix)(x[:5]).shape == (5, 0)
    assert launch.pack_linear(matrix)(x).shape == (6, 53)


def test_in_order_a_row_of_a_product_has_the_same_bits_in_every_batch(device: str) -> None:
    dtype = DTYPES[-1]
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(90, 168, generator=generator).to(dtype).to(device)
    x = torch.randn(150, 172, generator=generator).to(dtype).to(device)[:, 2:-2]
    product = launch.pack_linear_in_order(weight)(x)
    exact = x.double() @ weight.double().T
    allowed = 168 * UNIT[torch.float32] * (x.double().abs() @ weight.double().abs().T)
    allowed += UNIT[dtype] * (exact.abs() + allowed)
    assert ((product.double() - exact).abs() <= allowed).all()
    for first, end in ((0, 1), (3, 17), (60, 130)):
        assert torch.equal(launch.pack_linear_in_order(weight)(x[first:end]), product[first:end])


@forms
def test_the_reference_multiplies_by_the_numbers(form: str) -> None:
    matrix, x = make(form, 70, 328), torch.randn(5, 328)
    exact = x.double() @ expanded(matrix).double().T
    product = reference.pack_linear(matrix)(x).double()
    torch.testing.assert_close(product, exact, rtol=1e-5, atol=1e-5 * float(exact.std()))
    assert reference.pack_linear(matrix)(x.bfloat16()).dtype == torch.bfloat16


def chosen(num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(num_tokens, 5, generator=generator).argsort(1)[:, :2].int().contiguous()
    return ids.to(device), torch.rand(num_tokens, 2, generator=generator).to(device)


def make_experts(form: str, device: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Return five experts as codes, and the same as numbers."""
    gate_up, down = make(form, 5, 144, 96, device=device), make(form, 5, 96, 72, device=device)
    gate_up = replace(gate_up, scales=gate_up.scales / 256)  # gates that do not overflow
    return ExpertWeights(gate_up, down), ExpertWeights(expanded(gate_up), expanded(down))


@on_cpu
@forms
def test_in_c_experts_compute_as_their_numbers_to_the_last_bit(form: str) -> None:
    compute, exact = (experts_in_c.pack_experts(each) for each in make_experts(form, "cpu"))
    for num_tokens in (1, 50, 600):
        x, choice = torch.randn(num_tokens, 96) / 64, chosen(num_tokens, "cpu")
        product = compute(x, *choice)
        assert torch.equal(product, exact(x, *choice))
        half = compute(x.bfloat16(), *choice).float()
        torch.testing.assert_close(half, product, rtol=0.05, atol=float(product.std()) / 8)


@launchers("kernels", experts_in_triton, reference_experts)
@pytest.mark.parametrize(
    "form",
    [
        "float4",
        pytest.param("float8 in blocks", marks=pytest.mark.slow),
        pytest.param("int4 with zeros", marks=pytest.mark.slow),
    ],
)
def test_experts_compute_as_their_numbers(kernels: ModuleType, form: str, device: str) -> None:
    codes, numbers = make_experts(form, device)
    x, choice = (torch.randn(7, 96) / 64).to(device), chosen(7, device)
    pack: Callable[[ExpertWeights], Callable[..., torch.Tensor]] = kernels.pack_experts
    product = pack(codes)(x, *choice)
    exact = pack(numbers)(x, *choice)
    torch.testing.assert_close(product, exact, rtol=1e-4, atol=float(exact.std()) * 1e-4)


@pytest.mark.parametrize("form", ["", pytest.param("int4 with zeros", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_where_experts_have_large_tiles(
    form: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, numbers = make_experts(form or "int4", device)
    experts = codes if form else numbers
    if not form:
        gate_up, down = (expanded(each).half() for each in (numbers.gate_up, numbers.down))
        experts = ExpertWeights(gate_up, down)
    x, choice = (torch.randn(40, 96) / 64).half().to(device), chosen(40, device)
    compute = experts_in_triton.pack_experts(experts)
    small = compute(x, *choice)
    monkeypatch.setattr(experts_in_triton, "LARGE_TILE", 16)  # 80 choices of 5 experts
    large = compute(x, *choice)
    assert torch.equal(large, small) and float(small.float().std()) > 0
    some = slice(3, 30)
    assert torch.equal(compute(x[some], *(each[some] for each in choice)), small[some])
