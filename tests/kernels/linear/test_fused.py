"""Products with what comes before and after them, in one launch and in one order of sums."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.architecture.rope import rope_table
from tandem.engine.architecture.rope_config import RopeConfig
from tandem.kernels.arrivals import arrivals
from tandem.kernels.linear import launch
from tandem.kernels.reference import kv_store
from tandem.kernels.reference.quantized import Matrix, QuantizedMatrix, expanded
from tests.kernels.linear.test_products import make
from tests.kernels.tolerance import DTYPES, UNIT

IN_SIZE, EPS = 168, 1e-5
dtypes = pytest.mark.parametrize(
    "dtype",
    [DTYPES[-1], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[:-1])],
    ids=str,
)


@pytest.fixture(autouse=True)
def several_splits(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    """Three parts of the inputs, the last one shorter; counters go back to zero."""
    default = launch.default_config

    def small(**shape: Any) -> launch.LinearConfig:
        return replace(default(**shape), block_m=16, block_k=32, num_splits=3)

    monkeypatch.setattr(launch, "default_config", small)
    yield
    assert not arrivals(torch.zeros(1, device=device).device).any()


def numbers(*shape: int, dtype: torch.dtype, device: str, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double()


def assert_near(result: torch.Tensor, exact: torch.Tensor, num_roundings: float) -> None:
    """Each result is as near as sums of rounded inputs are, and a rounding at the end."""
    unit = num_roundings * UNIT[result.dtype] + IN_SIZE * UNIT[torch.float32]
    scale = exact.abs() + float(exact.std())
    assert ((result.double() - exact).abs() <= unit * scale).all()


CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "norm": {"norm": True},
    "bias": {"bias": True},
    "norm, SiLU": {"norm": True, "activation": "silu"},
    "norm, bias, GELU": {"norm": True, "bias": True, "activation": "gelu"},
    "residual": {"residual": True},
    "bias, residual": {"bias": True, "residual": True},
}


def arguments(case: str, num_tokens: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    parts = {
        "norm": numbers(IN_SIZE, dtype=dtype, device=device),
        "bias": numbers(80, dtype=dtype, device=device),
        "residual": numbers(num_tokens, 80, dtype=dtype, device=device),
    }
    found = {name: parts.get(name, value) for name, value in CASES[case].items()}
    return found | {"eps": EPS}


def expected(x: torch.Tensor, weight: torch.Tensor, case: dict[str, Any]) -> torch.Tensor:
    rows = normed(x, case["norm"]) if "norm" in case else x.double()
    result = rows @ weight.double().T
    if "bias" in case:
        result += case["bias"].double()
    if case.get("activation"):
        gate, up = result.chunk(2, 1)
        open_gate = torch.nn.functional.silu(gate)
        if case["activation"] == "gelu":
            open_gate = torch.nn.functional.gelu(gate, approximate="tanh")
        result = open_gate * up
    return result + case["residual"].double() if "residual" in case else result


@dtypes
@pytest.mark.parametrize("case", CASES)
def test_a_product_with_its_company_is_that_of_the_parts(
    case: str, dtype: torch.dtype, device: str
) -> None:
    x = numbers(19, IN_SIZE, dtype=dtype, device=device)
    weight = numbers(80, IN_SIZE, dtype=dtype, device=device) / 16
    company = arguments(case, 19, dtype, device)
    exact = expected(x, weight, company)
    result = launch.multiply(x, weight, **company)
    assert_near(result, exact, num_roundings=8)
    if "residual" in company:
        assert result is company["residual"]


@pytest.mark.parametrize(
    "case", ["norm, SiLU", pytest.param("bias, residual", marks=pytest.mark.slow)]
)
def test_a_row_has_the_same_bits_whoever_computes_the_splits(case: str, device: str) -> None:
    """Many tokens: a program for all splits. Few: one for each, and the last adds them up."""
    num_tokens = launch.MAX_SHARED_TOKENS + 1
    x = numbers(num_tokens, IN_SIZE, dtype=torch.float32, device=device)
    weight = numbers(80, IN_SIZE, dtype=torch.float32, device=device) / 16
    whole = launch.multiply(x, weight, **arguments(case, num_tokens, torch.float32, device))
    for first, end in ((0, 1), (5, 23)):
        company = arguments(case, num_tokens, torch.float32, device)
        if "residual" in company:
            company["residual"] = company["residual"][first:end].clone()
        assert torch.equal(launch.multiply(x[first:end], weight, **company), whole[first:end])


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("norm, SiLU", ""),
        ("alone", "int4 with zeros"),
        pytest.param("bias, residual", "", marks=pytest.mark.slow),
        pytest.param("norm, SiLU", "float8 in blocks", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("sums_in_order")
def test_a_row_has_the_same_bits_in_the_large_tiles_of_many_tokens(
    case: str, form: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, found = launch.large_config, list[launch.LinearConfig]()

    def recorded(config: launch.LinearConfig, *, has_codes: bool) -> launch.LinearConfig:
        found.append(large(config, has_codes=has_codes))
        return found[-1]

    monkeypatch.setattr(launch, "large_config", recorded)
    num_tokens = launch.MAX_SHARED_TOKENS + 30
    x = numbers(num_tokens, IN_SIZE, dtype=torch.float16, device=device)
    weight: Matrix = numbers(80, IN_SIZE, dtype=torch.float16, device=device) / 16
    if form:
        matrix = make(form, 80, IN_SIZE, device=device)
        weight = replace(matrix, scales=matrix.scales / 256)
    whole = launch.multiply(x, weight, **arguments(case, num_tokens, torch.float16, device))
    assert [each.block_m for each in found] == [128]
    for first, end in ((0, 1), (5, 23), (120, 158)):
        company = arguments(case, num_tokens, torch.float16, device)
        if "residual" in company:
            company["residual"] = company["residual"][first:end].clone()
        assert torch.equal(launch.multiply(x[first:end], weight, **company), whole[first:end])
    assert len(found) == 1
    exact = expected(x, expanded(weight), arguments(case, num_tokens, torch.float16, device))
    assert_near(whole, exact, num_roundings=8)


def test_rows_of_large_numbers_do_not_overflow_before_they_are_normed(device: str) -> None:
    x = 3000 * numbers(3, IN_SIZE, dtype=torch.float16, device=device)
    weight, norm = (
        numbers(*shape, dtype=torch.float16, device=device) for shape in ((80, IN_SIZE), (IN_SIZE,))
    )
    norm = 50 * norm
    result = launch.multiply(x, weight / 64, norm=norm, eps=EPS)
    assert_near(result, normed(x, norm) @ (weight / 64).double().T, num_roundings=8)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float8 in blocks", "int4 with zeros"])
def test_codes_are_multiplied_as_their_numbers(form: str, device: str) -> None:
    x = numbers(5, IN_SIZE, dtype=torch.float32, device=device)
    norm = numbers(IN_SIZE, dtype=torch.float32, device=device)
    matrix: QuantizedMatrix = make(form, 80, IN_SIZE, device=device)
    matrix = replace(matrix, scales=matrix.scales / 256)
    result = launch.multiply(x, matrix, norm=norm, eps=EPS, activation="silu")
    exact = expected(x, expanded(matrix), {"norm": norm, "activation": "silu"})
    torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.std()))


@dtypes
@pytest.mark.parametrize("head_dim", [pytest.param(16, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("has_parts", [True, False], ids=["norms, bias", "bare"])
def test_heads_are_stored_as_by_the_kernels_one_after_another(
    head_dim: int, has_parts: bool, dtype: torch.dtype, device: str
) -> None:
    num_tokens, num_heads, num_kv_heads, block_size = 7, 3, 2, 4
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    x = numbers(num_tokens, IN_SIZE, dtype=dtype, device=device)
    weight: Matrix = numbers(rows, IN_SIZE, dtype=dtype, device=device)
    norm, bias = (numbers(size, dtype=dtype, device=device) for size in (IN_SIZE, rows))
    qk_norm = numbers(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
    table = rope_table(RopeConfig(1e4), head_dim, 32, dtype, torch.device(device))
    positions = torch.tensor([3, 0, 31, 8, 9, 9, 1], device=device)
    slots = torch.tensor([0, 17, 5, -1, 6, 30, 11], device=device)
    parts: dict[str, Any] = {"norm": norm, "bias": bias} if has_parts else {}
    shape = (9, 3, 2, num_kv_heads, block_size, head_dim)
    pools = [torch.zeros(shape, dtype=kind, device=device) for kind in (dtype, torch.float64)]
    where = (table, positions, slots)
    heads_norm = qk_norm if has_parts else None
    q = launch.multiply_qkv(x, weight, heads_norm, *where, pools[0][:, 1], EPS, **parts)

    qkv = expected(x, weight, parts).view(num_tokens, -1, head_dim)
    wide = None if heads_norm is None else heads_norm.double()
    exact_q = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float64, device=device)
    kv_store.store_qkv(qkv, wide, table.double(), positions, slots, pools[1][:, 1], EPS, exact_q)
    assert_near(q, exact_q, num_roundings=8)
    assert_near(pools[0], pools[1], num_roundings=8)
    assert bool((pools[0][:, 1] != 0).any()) and not pools[0][:, ::2].any()
