"""Products for few tokens alone: cuBLAS's beside Tandem's. bench.engine has them in whole steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tandem.bench.kernels.cases import ERROR_BOUNDS, Call, Case, measure_groups, relative_error
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting
from tandem.kernels.linear.launch import Activation, multiply

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128


def run(setting: Setting) -> Iterator[Figure]:
    tokens = 1, setting.size(16, 2), setting.size(64, 3)
    yield from measure_groups([_products_of(num_tokens) for num_tokens in tokens], setting)


def _products_of(num_tokens: int) -> Callable[[Setting], Sequence[Case]]:
    def products(setting: Setting) -> Sequence[Case]:
        return _product_cases(setting, num_tokens)

    products.__name__ = f"products_{num_tokens}"
    return products


def _product_cases(setting: Setting, num_tokens: int) -> Sequence[Case]:
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
