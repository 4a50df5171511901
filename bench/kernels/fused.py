"""Products for few tokens: cuBLAS's beside Tandem's, alone and in a layer of a decode step.

A layer is all but its attention. Each way takes turns with the others: cuBLAS with kernels around
it, products that have those in them, and both with kernels that begin while the one before ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tandem.bench.kernels.cases import ERROR_BOUNDS, Call, Case, measure_groups, relative_error
from tandem.bench.kernels.pool import Pool
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting
from tandem.engine.models.rope import rope_table
from tandem.engine.models.rope_config import RopeConfig
from tandem.kernels.dependent_launch import use_dependent_launch
from tandem.kernels.layers.activation import silu_mul
from tandem.kernels.layers.kv_store import store_qkv
from tandem.kernels.layers.norm import add_rms_norm, rms_norm
from tandem.kernels.linear.launch import Activation, multiply, multiply_qkv

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
BLOCK_SIZE, EPS = 64, 1e-6
# A layer rounds some ten times, and its ways not at the same places.
LAYER_ROUNDINGS = 10


def run(setting: Setting) -> Iterator[Figure]:
    tokens = 1, setting.size(16, 2), setting.size(64, 3)
    groups = [_named(_layer_cases, num_tokens) for num_tokens in tokens]
    groups += [_named(_product_cases, num_tokens) for num_tokens in tokens]
    try:
        yield from measure_groups(groups, setting)
    finally:
        use_dependent_launch(False)


def _named(
    cases: Callable[[Setting, int], Sequence[Case]], num_tokens: int
) -> Callable[[Setting], Sequence[Case]]:
    def group(setting: Setting) -> Sequence[Case]:
        return cases(setting, num_tokens)

    group.__name__ = f"{cases.__name__}_{num_tokens}"
    return group


@dataclass(slots=True)
class _Layer:
    """One layer's weights, and the residual stream that goes through it."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    hidden: torch.Tensor
    cache: torch.Tensor

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class _Layers:
    """Layers that calls go through in turns, and what they share."""

    def __init__(self, setting: Setting, num_tokens: int) -> None:
        hidden, width = setting.size(HIDDEN, 32), setting.size(INTERMEDIATE, 48)
        heads, kv_heads = setting.size(HEADS, 2), setting.size(KV_HEADS, 1)
        self.head_dim = setting.size(HEAD_DIM, 16)
        q_size, all_heads = heads * self.head_dim, heads + 2 * kv_heads
        pool = Pool(4 * BLOCK_SIZE, 2, kv_heads, self.head_dim, setting)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return setting.randn(rows, columns).mul_(columns**-0.5)

        self.layers = [
            _Layer(
                matrix(all_heads * self.head_dim, hidden),
                matrix(hidden, q_size),
                matrix(2 * width, hidden),
                matrix(hidden, width),
                setting.randn(num_tokens, hidden),
                pool.layer(index, BLOCK_SIZE),
            )
            for index in range(setting.size(2, 1))
        ]
        device = setting.device
        self.heads, self.num_tokens = heads, num_tokens
        self.norm = setting.randn(hidden)
        self.qk_norm = setting.randn(heads + kv_heads, self.head_dim)
        self.table = rope_table(RopeConfig(1e4), self.head_dim, 64, setting.dtype, device)
        self.positions = torch.arange(num_tokens, device=device) % 64
        self.slots = torch.arange(num_tokens, device=device)

    def by_parts(self, layer: _Layer) -> None:
        """Run the layer with cuBLAS's products: eight kernels, and attention left out."""
        hidden = layer.hidden
        normed = torch.empty_like(hidden)
        rms_norm(hidden, self.norm, EPS, normed)
        qkv = F.linear(normed, layer.qkv).view(self.num_tokens, -1, self.head_dim)
        q = qkv[:, : self.heads]
        where = (self.table, self.positions, self.slots, layer.cache)
        store_qkv(qkv, self.qk_norm, *where, EPS, q)
        attention = F.linear(q.flatten(1), layer.output)
        add_rms_norm(attention, hidden, self.norm, EPS, attention)
        gate_up = F.linear(attention, layer.gate_up)
        opened = hidden.new_empty(self.num_tokens, gate_up.shape[1] // 2)
        silu_mul(gate_up, opened)
        hidden.add_(F.linear(opened, layer.down))

    def fused(self, layer: _Layer) -> None:
        """Run the layer with Tandem's products: four kernels, and attention left out."""
        hidden = layer.hidden
        where = (self.table, self.positions, self.slots, layer.cache)
        q = multiply_qkv(hidden, layer.qkv, self.qk_norm, *where, EPS, norm=self.norm)
        multiply(q.flatten(1), layer.output, residual=hidden)
        opened = multiply(hidden, layer.gate_up, norm=self.norm, eps=EPS, activation="silu")
        multiply(opened, layer.down, residual=hidden)


def _layer_cases(setting: Setting, num_tokens: int) -> Sequence[Case]:
    layers = _Layers(setting, num_tokens)
    start = layers.layers[0].hidden.clone()
    layers.by_parts(layers.layers[0])
    expected = layers.layers[0].hidden.clone()
    num_bytes = sum(matrix.nbytes for matrix in layers.layers[0].matrices)

    def check(run: Call) -> float:
        for layer in layers.layers:
            layer.hidden.copy_(start)  # it grows from call to call
        run()
        return relative_error(layers.layers[0].hidden, expected)

    def case(name: str, label: str, way: Callable[[_Layer], None], is_early: bool) -> Case:
        def launch(index: int, _: Any) -> None:
            use_dependent_launch(is_early)
            way(layers.layers[index])

        return Case(
            name=f"layer_{name}_b{num_tokens}",
            label=f"layer without attention, {num_tokens} tokens, {label}",
            work=float(num_bytes),
            launch=launch,
            num_sets=len(layers.layers),
            check=check,
            error_bound=LAYER_ROUNDINGS * ERROR_BOUNDS[setting.dtype],
        )

    return [
        case("cublas", "cuBLAS", layers.by_parts, is_early=False),
        case("cublas_early", "cuBLAS, dependent launches", layers.by_parts, is_early=True),
        case("fused", "fused products", layers.fused, is_early=False),
        case("fused_early", "fused products, dependent launches", layers.fused, is_early=True),
    ]


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
        use_dependent_launch(False)
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
