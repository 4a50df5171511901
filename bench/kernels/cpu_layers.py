"""Steps of one token through layers of experts on a CPU, in turns with dense layers.

python -m tandem.bench.kernels.cpu_layers
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from tandem.bench.report.options import option, parse
from tandem.kernels.cpu.experts import pack_experts, route
from tandem.kernels.cpu.launch import silu_mul
from tandem.kernels.cpu.linear import pack_linear
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.routing import Routing

MODULE = "tandem.bench.kernels.cpu_layers"
NUM_EXPERTS, ROUTING = 8, Routing(2)
HIDDEN_SIZE, WIDTH = 1024, 1408  # of an expert; dense layers are as wide as the chosen ones
NUM_LAYERS = 14  # more bytes than a cache holds, on every side
MOST = 1.15  # times the dense layers, which read the same bytes

Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """Time a token through 14 layers of 8 experts with 2 chosen, and through dense ones."""

    rounds: int = option(40, "in each of which both take a turn")
    threads: int = option(2, "of the kernels")


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


def seconds(layers: Sequence[Layer], x: torch.Tensor) -> float:
    """Return the time of one pass through `layers`, all with the same input."""
    began = perf_counter()
    for layer in layers:
        layer(x)
    return perf_counter() - began


def ratio(dtype: torch.dtype, rounds: int) -> float:
    """Print the medians of both sides; return the median of the rounds' ratios of the times."""
    sides = [[make(dtype) for _ in range(NUM_LAYERS)] for make in (mixture, dense)]
    times = []
    for _ in range(rounds):
        x = torch.randn(1, HIDDEN_SIZE).to(dtype)
        times.append([seconds(side, x) for side in sides])
    median = statistics.median(our_s / their_s for our_s, their_s in times)
    our_ms, their_ms = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
    print(f"experts: {our_ms:.1f} ms, dense {dtype}: {their_ms:.1f} ms, ratio {median:.2f}")
    return median


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the medians; 1 when a ratio is above its bound."""
    options = parse(Options, MODULE, arguments)
    torch.set_num_threads(options.threads)
    ratios = [ratio(dtype, options.rounds) for dtype in (torch.float32, torch.bfloat16)]
    return int(max(ratios) > MOST)


if __name__ == "__main__":
    sys.exit(main())
