"""Products whose sums run in segments, so that processes can share one and get the same bits.

The inputs of a matrix are cut into segments. Each is summed by itself in float32, and the sums are
added pairwise, neighbors first. Whoever holds which segments, that tree is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import Matrix

MAX_SEGMENTS = 8  # 2 ** (SEGMENT_LEVELS - 1) of kernels/cpu/segments.h

# x [num_tokens, in], weight [out, in] |-> [num_tokens, out] in float32
Multiply = Callable[[torch.Tensor, Matrix], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments [first, first + count) of the `num_all` into which `in_size` inputs are cut.

    They are cut at multiples of `unit`, an even number where there are several: no pair of bfloat16
    is parted. `count` is a power of two, at most MAX_SEGMENTS, and no segment is empty.
    """

    in_size: int
    num_all: int
    first: int
    count: int
    unit: int = 2

    def __post_init__(self) -> None:
        assert self.unit % 2 == 0 or self.num_all == 1
        assert self.in_size // self.unit >= self.num_all
        assert self.count in (1, 2, 4, MAX_SEGMENTS)

    @property
    def inputs(self) -> range:
        """The inputs in these segments."""
        return range(self._start(self.first), self._start(self.first + self.count))

    @property
    def ranges(self) -> list[range]:
        """The inputs of each of these segments, counted from the first of them all."""
        starts = [self._start(self.first + each) for each in range(self.count + 1)]
        return [range(a - starts[0], b - starts[0]) for a, b in pairwise(starts)]

    def _start(self, segment: int) -> int:
        if segment == self.num_all:
            return self.in_size
        return self.in_size // self.unit * segment // self.num_all * self.unit


def pack_in_segments(weight: Matrix, segments: Segments, multiply: Multiply) -> Linear:
    """Return the product with the inputs of some segments of a matrix, in float32.

    `weight` [out, len(segments.inputs)] has those alone; of several segments, of numbers, it is
    copied.
    """
    assert weight.shape[1] == len(segments.inputs)
    ranges = segments.ranges
    if len(ranges) == 1:
        return lambda x: multiply(x, weight)
    assert isinstance(weight, torch.Tensor)
    parts = [weight[:, each.start : each.stop].contiguous() for each in ranges]

    def linear(x: torch.Tensor) -> torch.Tensor:
        products = zip(ranges, parts, strict=True)
        return sum_pairwise([multiply(x[:, each.start : each.stop], p) for each, p in products])

    return linear


def sum_pairwise(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of a power of two of parts, neighbors first."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
