"""Steps of one token through layers of experts on a CPU, in turns with dense layers.

python -m tandem.bench.kernels.cpu_layers
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from tandem.bench.report.figures import Figure, at_most
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.report.turns import compared
from tandem.kernels.cpu.experts import pack_experts, route
from tandem.kernels.cpu.launch import silu_mul
from tandem.kernels.cpu.linear import pack_linear
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.routing import Routing

MODULE = "tandem.bench.kernels.cpu_layers"
NUM_EXPERTS, ROUTING = 8, Routing(2)
HIDDEN_SIZE, WIDTH = 1024, 1408  # of an expert; dense layers are as wide as the chosen ones
NUM_LAYERS = 14  # more bytes than a cache holds, on every side
TARGET = at_most(1.15)  # times the dense layers, which read the same bytes
HOW = {
    "layers": f"a token through {NUM_LAYERS} layers of {NUM_EXPERTS} experts, of which "
    f"{ROUTING.num_chosen} are chosen, and through dense layers that read the same bytes",
    "times": "medians of rounds, in each of which both take a turn; the ratio is taken in each",
}

Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """Time a token through 14 layers of 8 experts with 2 chosen, and through dense ones."""

    rounds: int = option(40, "in each of which both take a turn")
    threads: int = option(2, "of the kernels")
    output: Path | None = option(None, "write everything as JSON")


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(shape[-1] ** -0.5).to(dtype)


def mixture(dtype: torch.dtype) -> Layer:
    """Return a layer of experts with its router."""
    router = pack_linear(_numbers(dtype, NUM_EXPERTS, HIDDEN_SIZE))
    experts = pack_experts(
        ExpertWeights(
            _numbers(dtype, NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE),
            _numbers(dtype, NUM_EXPERTS, HIDDEN_SIZE, WIDTH),
        )
    )

    def compute(x: torch.Tensor) -> torch.Tensor:
        expert_ids = torch.empty(len(x), ROUTING.num_chosen, dtype=torch.int32)
        weights = torch.empty(len(x), ROUTING.num_chosen)
        route(router(x), None, ROUTING, expert_ids, weights)
        return experts(x, expert_ids, weights)

    return compute


def dense(dtype: torch.dtype) -> Layer:
    """Return a feed-forward layer as wide as the chosen experts."""
    width = ROUTING.num_chosen * WIDTH
    gate_up = pack_linear(_numbers(dtype, 2 * width, HIDDEN_SIZE))
    down = pack_linear(_numbers(dtype, HIDDEN_SIZE, width))

    def compute(x: torch.Tensor) -> torch.Tensor:
        hidden = gate_up(x)
        opened = hidden.new_empty(len(x), width)
        silu_mul(hidden, opened)
        return down(opened)

    return compute


def run_layers(layers: Sequence[Layer], dtype: torch.dtype) -> None:
    """Compute `layers` of one new token, all with the same input."""
    x = torch.randn(1, HIDDEN_SIZE).to(dtype)
    for layer in layers:
        layer(x)


def measure(options: Options) -> Iterator[Figure]:
    """Yield the times of both kinds of layers in two dtypes."""
    torch.set_num_threads(options.threads)
    for dtype in (torch.float32, torch.bfloat16):
        works = {
            name: partial(run_layers, [make(dtype) for _ in range(NUM_LAYERS)], dtype)
            for name, make in (("dense", dense), ("experts", mixture))
        }
        label = str(dtype).removeprefix("torch.")
        yield from compared(label, works, options.rounds, TARGET, clock=perf_counter)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; 1 when a ratio is above its target."""
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, HOW, lambda _: measure(options))


if __name__ == "__main__":
    sys.exit(main())
