"""Products in C whose sums run in segments, in the order of kernels.reference.segments."""

import ctypes

import torch

from tandem.kernels.cpu.launch import DTYPES, INT, LONG, POINTER, fields, function
from tandem.kernels.cpu.linear import is_for_c
from tandem.kernels.cpu.linear import pack_panels as pack_numbers
from tandem.kernels.cpu.quantized import pack_panels as pack_codes
from tandem.kernels.reference.quantized import Matrix
from tandem.kernels.reference.segments import Segments


class SegmentsStruct(ctypes.Structure):
    """struct segments"""

    _fields_ = fields((LONG, "in_size num_all first count unit"))


class MatrixStruct(ctypes.Structure):
    """struct matrix"""

    _fields_ = fields((POINTER, "numbers codes"), (LONG, "in_size"), (INT, "in_pairs"))


_linear_in_segments = function("linear_in_segments", *[POINTER] * 4, *[LONG] * 3, *[INT] * 2)


def segments_struct(segments: Segments) -> SegmentsStruct:
    """Return the segments as C takes them."""
    each = segments
    return SegmentsStruct(each.in_size, each.num_all, each.first, each.count, each.unit)


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
        self._segments = segments_struct(segments)
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
        num_tokens = x.shape[0]  # `len` of a tensor takes longer than all of this
        out = torch.empty(num_tokens, self._out_size, dtype=dtype)
        _linear_in_segments(
            ctypes.addressof(self._matrix),
            ctypes.addressof(self._segments),
            x.data_ptr(),
            out.data_ptr(),
            num_tokens,
            self._out_size,
            x.stride(0),
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return out
