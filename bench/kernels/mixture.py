"""A step of one token through experts on a CPU, beside dense layers that read the same bytes.

python -m tandem.bench.kernels.mixture
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

MODULE = "tandem.bench.kernels.mixture"
MOST_RATIO = 1.15  # of the times, experts over dense
NUM_EXPERTS, ROUTING = 8, Routing(2)
HIDDEN_SIZE, WIDTH = 1024, 1408
NUM_LAYERS = 14  # more bytes than a cache holds, in both

Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """Time a token through 14 layers of 8 experts, 2 chosen, and of one as wide as both."""

    rounds: int = option(40, "in each of which both take a turn")
    threads: int = option(2, "of the kernels")


def _weight(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(shape[-1] ** -0.5).to(dtype)


def mixture(dtype: torch.dtype) -> Layer:
    """Return a layer of experts with its router."""
    router = pack_linear(_weight(dtype, NUM_EXPERTS, HIDDEN_SIZE))
    experts = pack_experts(
        ExpertWeights(
            _weight(dtype, NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE),
            _weight(dtype, NUM_EXPERTS, HIDDEN_SIZE, WIDTH),
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
    gate_up = pack_linear(_weight(dtype, 2 * width, HIDDEN_SIZE))
    down = pack_linear(_weight(dtype, HIDDEN_SIZE, width))

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the medians; 1 when the ratio of a dtype is above its bound."""
    options = parse(Options, MODULE, arguments)
    torch.set_num_threads(options.threads)
    ratios = []
    for dtype in (torch.float32, torch.bfloat16):
        sides = [[make(dtype) for _ in range(NUM_LAYERS)] for make in (mixture, dense)]
        rounds = []
        for _ in range(options.rounds):
            x = torch.randn(1, HIDDEN_SIZE).to(dtype)
            rounds.append([seconds(side, x) for side in sides])
        ratios.append(statistics.median(ours / theirs for ours, theirs in rounds))
        ours, theirs = (1e3 * statistics.median(side) for side in zip(*rounds, strict=True))
        print(f"{dtype}: experts {ours:.1f} ms, dense {theirs:.1f} ms, ratio {ratios[-1]:.2f}")
    return int(max(ratios) > MOST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
