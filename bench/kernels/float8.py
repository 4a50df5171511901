"""Products with FP8 weights: expanded on the chip, FP8 by FP8, and cuBLAS's in bfloat16."""

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
from tandem.kernels.linear.launch import multiply
from tandem.kernels.reference.quantized import (
    INPUT_GROUP,
    QuantizedMatrix,
    expanded,
    rounded_inputs,
)

# [rows, inputs] of an 8-billion-parameter model: many rows, and inputs that are cut into splits
MATRICES = {"gate_up": (24576, 4096), "down": (4096, 12288)}
TINY = (96, 384)
FEW, MANY = (1, 16, 128), (256, 1024, 8192)
LEAST_BOUND = 1e-3  # a Hopper adds up 128 products with some 14 bits


def run(setting: Setting) -> Iterator[Figure]:
    if not has_float8_products():
        yield Figure("float8", "products of FP8 by FP8", "", notes=("not on this chip",))
        return
    groups = []
    for name, num_tokens in ((name, tokens) for tokens in (*FEW, *MANY) for name in MATRICES):
        if setting.is_dry and num_tokens not in (1, 256):
            continue
        group = partial(_cases, name=name, num_tokens=num_tokens)
        group.__name__ = f"{name}_{num_tokens}"  # type: ignore[attr-defined]
        groups.append(group)
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


def _cases(setting: Setting, *, name: str, num_tokens: int) -> Sequence[Case]:
    rows, in_size = TINY if setting.is_dry else MATRICES[name]
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
            error_bound=max(LEAST_BOUND, ERROR_BOUNDS[setting.dtype]),
            is_ours=is_ours,
        )

    return [
        case("cublas", "bfloat16 by cuBLAS", wide, is_ours=False),
        case("expanded", "FP8 expanded on the chip", alone),
        case("rounded", "FP8 by FP8", weights),
    ]
