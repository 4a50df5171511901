"""Products alone: of few tokens, cuBLAS's beside Tandem's, and with FP8 weights.

`bench.engine` has those of few tokens in whole steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tandem.bench.kernels.cases import ERROR_BOUNDS, Call, Case, measure_groups, relative_error
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting
from tandem.kernels.linear.float8 import has_float8_products
from tandem.kernels.linear.launch import Activation, multiply
from tandem.kernels.reference.quantized import (
    INPUT_GROUP,
    QuantizedMatrix,
    expanded,
    rounded_inputs,
)

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
# [rows, inputs] of FP8 weights: many rows, and inputs that are cut into splits
FLOAT8_MATRICES = {"gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
FLOAT8_TINY = (96, 384)
FEW, MANY = (1, 16, 128), (256, 1024, 8192)
LEAST_FLOAT8_BOUND = 1e-3  # a Hopper adds up 128 products with some 14 bits


# ---- few tokens -------------------------------------------------------------------------------


def run(setting: Setting) -> Iterator[Figure]:
    """Measure cuBLAS's products of few tokens and Tandem's."""
    tokens = 1, setting.size(16, 2), setting.size(64, 3)
    groups = {f"products {count}": partial(_products, num_tokens=count) for count in tokens}
    yield from measure_groups(groups, setting)


def _products(setting: Setting, *, num_tokens: int) -> Sequence[Case]:
    hidden, width = setting.size(HIDDEN, 32), setting.size(INTERMEDIATE, 48)
    rows = setting.size((HEADS + 2 * KV_HEADS) * HEAD_DIM, 64)
    sizes = {"qkv": (rows, hidden), "output": (hidden, hidden), "down": (hidden, width)}
    return [
        product_case(setting, num_tokens, f"{name}_{way}", *size, is_ours=way == "own")
        for name, size in sizes.items()
        for way in ("cublas", "own")
    ]


def product_case(
    setting: Setting,
    num_tokens: int,
    name: str,
    rows: int,
    columns: int,
    *,
    is_ours: bool = True,
    is_paired: bool = False,
) -> Case:
    """Return a product alone; if it is paired, with the activation of the first half of rows."""
    num_sets = setting.num_sets(rows * columns * setting.dtype.itemsize)
    weights = setting.randn(num_sets, rows, columns).mul_(columns**-0.5)
    x = setting.randn(num_tokens, columns)
    results: dict[int, torch.Tensor] = {}

    def launch(index: int, config: Any) -> None:
        if not is_ours:
            results[index] = F.linear(x, weights[index])
            return
        activation: Activation = "silu" if is_paired else ""
        results[index] = multiply(x, weights[index], activation=activation, config=config)

    def check(run: Call) -> float:
        run()
        expected = x.double() @ weights[0].double().T
        if is_paired:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        return relative_error(results[0], expected)

    return Case(
        name=f"product_{name}_b{num_tokens}",
        label=f"product of {num_tokens} tokens, {name.replace('_', ', ')}",
        work=float(weights[0].nbytes),
        launch=launch,
        num_sets=num_sets,
        check=check,
        error_bound=ERROR_BOUNDS[setting.dtype],
        is_ours=is_ours,
    )


# ---- FP8 weights ------------------------------------------------------------------------------


def run_float8(setting: Setting) -> Iterator[Figure]:
    """Measure FP8 weights expanded on the chip, FP8 by FP8, and cuBLAS's product in bfloat16."""
    if not has_float8_products():
        yield Figure("float8", "products of FP8 by FP8", "", notes=("not on this chip",))
        return
    groups = {
        f"{name} {num_tokens}": partial(_float8_cases, name=name, num_tokens=num_tokens)
        for num_tokens in ((1, 256) if setting.is_dry else (*FEW, *MANY))
        for name in FLOAT8_MATRICES
    }
    yield from measure_groups(groups, setting)


def exact_inputs(setting: Setting, num_tokens: int, size: int) -> torch.Tensor:
    """Return inputs that rounding leaves as they are: the interpreter's rounding loses carries."""
    codes = _codes(setting, num_tokens, size)
    codes[:, ::INPUT_GROUP] = 126  # the largest number
    return (codes.view(torch.float8_e4m3fn).float() / 256).to(setting.dtype)


def float8_matrix(setting: Setting, rows: int, in_size: int) -> QuantizedMatrix:
    """Return a matrix with a scale for each row and INPUT_GROUP, which rounds its inputs."""
    groups = -(-in_size // INPUT_GROUP)
    scales = 2**-8 * (1 + torch.rand(rows, groups, device=setting.device))
    codes = _codes(setting, rows, in_size)
    return QuantizedMatrix("float8", codes, scales, INPUT_GROUP, rounds_inputs=True)


def _codes(setting: Setting, *shape: int) -> torch.Tensor:
    codes = torch.randint(256, shape, dtype=torch.uint8, device=setting.device)
    return codes.masked_fill_((codes & 127) == 127, 0)


def _float8_cases(setting: Setting, *, name: str, num_tokens: int) -> Sequence[Case]:
    rows, in_size = FLOAT8_TINY if setting.is_dry else FLOAT8_MATRICES[name]
    num_sets = min(4, setting.num_sets(rows * in_size))
    weights = [float8_matrix(setting, rows, in_size) for _ in range(num_sets)]
    alone = [replace(weight, rounds_inputs=False) for weight in weights]
    wide = [expanded(weight).to(setting.dtype) for weight in weights]
    x = exact_inputs(setting, num_tokens, in_size)
    expected = rounded_inputs(x) @ expanded(weights[0]).T
    results: dict[int, torch.Tensor] = {}

    def case(way: str, label: str, sets: Sequence[Any], *, is_ours: bool = True) -> Case:
        def launch(index: int, _: Any) -> None:
            product = multiply if is_ours else F.linear
            results[index] = product(x, sets[index])

        def check(run: Call) -> float:
            run()
            return relative_error(results[0], expected)

        is_few = num_tokens in FEW
        return Case(
            name=f"float8_{name}_{way}_b{num_tokens}",
            label=f"{num_tokens} tokens by {rows} x {in_size}, {label}",
            unit="us" if is_few else "TFLOP/s",
            work=float(rows * in_size if is_few else 2 * num_tokens * rows * in_size),
            rate="read" if is_few else "matmul",
            launch=launch,
            num_sets=num_sets,
            check=check,
            error_bound=max(LEAST_FLOAT8_BOUND, ERROR_BOUNDS[setting.dtype]),
            is_ours=is_ours,
        )

    return [
        case("cublas", "bfloat16 by cuBLAS", wide, is_ours=False),
        case("expanded", "FP8 expanded on the chip", alone),
        case("rounded", "FP8 by FP8", weights),
    ]
