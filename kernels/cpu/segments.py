"""Products whose sums run in segments, so that processes can share one and get the same bits.

The inputs of a matrix are cut into segments. Each is summed by itself in float32, and the sums are
added pairwise, neighbors first. Whoever holds which segments, that tree is the same.
"""

import ctypes
from dataclasses import dataclass

import torch

from tandem.kernels.cpu.launch import DTYPES, INT, LONG, POINTER, fields, function
from tandem.kernels.cpu.linear import is_for_c
from tandem.kernels.cpu.linear import pack_panels as pack_numbers
from tandem.kernels.cpu.quantized import pack_panels as pack_codes
from tandem.kernels.reference.quantized import Matrix

MAX_SEGMENTS = 8  # 2 ** (SEGMENT_LEVELS - 1) of segments.h


class SegmentsStruct(ctypes.Structure):
    """struct segments"""

    _fields_ = fields((LONG, "in_size num_all first count unit"))


class MatrixStruct(ctypes.Structure):
    """struct matrix"""

    _fields_ = fields((POINTER, "numbers codes"), (LONG, "in_size"), (INT, "in_pairs"))


_linear_in_segments = function("linear_in_segments", *[POINTER] * 4, *[LONG] * 3, *[INT] * 2)


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
    def struct(self) -> SegmentsStruct:
        return SegmentsStruct(self.in_size, self.num_all, self.first, self.count, self.unit)

    def _start(self, segment: int) -> int:
        if segment == self.num_all:
            return self.in_size
        return self.in_size // self.unit * segment // self.num_all * self.unit


class SegmentedLinear:
    """The product with the inputs of some segments of a matrix, in the C kernels' own layout.

    That of codes takes operands of any dtype, as pack_quantized's does.
    """

    def __init__(
        self,
        weight: Matrix,  # [out, len(segments.inputs)]; is_for_c is true of one of numbers
        segments: Segments,
        out_dtype: torch.dtype | None = None,  # None: that of the operands
    ) -> None:
        self._out_size, self._in_size = weight.shape
        assert self._in_size == len(segments.inputs)
        self._out_dtype = out_dtype
        self._segments = segments.struct
        if isinstance(weight, torch.Tensor):
            assert is_for_c(weight)
            self._dtype, numbers = weight.dtype, pack_numbers(weight)
            in_pairs = weight.dtype == torch.bfloat16
            in_size = self._in_size // 2 if in_pairs else self._in_size
            self._matrix = MatrixStruct(numbers.data_ptr(), None, in_size, in_pairs)
            self._panels: object = numbers  # owns the memory
        else:
            assert segments.unit % 8 == 0
            self._dtype, codes = torch.float32, pack_codes(weight)
            self._matrix = MatrixStruct(None, codes.pointer, self._in_size, False)
            self._panels = codes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, out] of x [num_tokens, len(segments.inputs)]."""
        dtype = self._out_dtype or x.dtype
        if self._matrix.codes:
            x = x.float()
        assert x.dtype == self._dtype and x.stride(1) == 1 and x.shape[1] == self._in_size
        assert x.dtype == torch.float32 or x.stride(0) % 2 == 0
        out = torch.empty(len(x), self._out_size, dtype=dtype)
        _linear_in_segments(
            ctypes.addressof(self._matrix),
            ctypes.addressof(self._segments),
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            self._out_size,
            x.stride(0),
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return out
