"""Products whose sums run in segments, so that processes can share one and get the same bits.

The inputs of a matrix are cut into segments. Each is summed by itself in float32, and the sums are
added pairwise, neighbors first. Whoever holds which segments, that tree is the same.
"""

import ctypes
from dataclasses import dataclass

import torch

from tandem.kernels.cpu.launch import DTYPES, INT, LONG, POINTER, fields, function
from tandem.kernels.cpu.linear import is_for_c, pack_panels

MAX_SEGMENTS = 8  # 2 ** (SEGMENT_LEVELS - 1) of linear.c


class _Segments(ctypes.Structure):
    """struct segments"""

    _fields_ = fields((LONG, "in_size num_all first count"))


_linear_in_segments = function(
    "linear_in_segments", *[POINTER] * 3, *[LONG] * 3, POINTER, *[INT] * 3
)


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments [first, first + count) of the `num_all` into which `in_size` inputs are cut.

    `count` is a power of two, at most MAX_SEGMENTS, and no segment is empty.
    """

    in_size: int
    num_all: int
    first: int
    count: int

    @property
    def inputs(self) -> range:
        """The inputs in these segments."""
        return range(self._start(self.first), self._start(self.first + self.count))

    def _start(self, segment: int) -> int:
        if segment == self.num_all:
            return self.in_size
        return self.in_size // 2 * segment // self.num_all * 2  # no pair of bfloat16 is parted


class SegmentedLinear:
    """The product with the inputs of some segments of a matrix, in the C kernels' own layout."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, len(segments.inputs)], of which is_for_c is true
        segments: Segments,
        out_dtype: torch.dtype | None = None,  # None: that of the operands
    ) -> None:
        assert is_for_c(weight) and weight.shape[1] == len(segments.inputs)
        assert segments.count in (1, 2, 4, MAX_SEGMENTS)
        assert segments.in_size // 2 >= segments.num_all
        self._out_size, self._in_size = weight.shape
        self._panels = pack_panels(weight)
        self._out_dtype = out_dtype or weight.dtype
        self._cut = _Segments(segments.in_size, segments.num_all, segments.first, segments.count)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, out] of x [num_tokens, len(segments.inputs)]."""
        assert x.dtype == self._panels.dtype and x.stride(1) == 1 and x.shape[1] == self._in_size
        assert x.dtype == torch.float32 or x.stride(0) % 2 == 0
        out = torch.empty(len(x), self._out_size, dtype=self._out_dtype)
        _linear_in_segments(
            x.data_ptr(),
            self._panels.data_ptr(),
            out.data_ptr(),
            len(x),
            self._out_size,
            x.stride(0),
            ctypes.addressof(self._cut),
            DTYPES[x.dtype],
            DTYPES[out.dtype],
            torch.get_num_threads(),
        )
        return out
