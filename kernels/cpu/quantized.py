"""Weight matrices that are multiplied in C from their codes, and their layout."""

import ctypes
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tandem.kernels.cpu.launch import DTYPES, INT, LONG, PANEL, POINTER, fields, function
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import TABLES, QuantizedMatrix


class QuantizedStruct(ctypes.Structure):
    """struct quantized"""

    _fields_ = fields(
        (POINTER, "codes scales zeros table"), (LONG, "in out group_size"), (INT, "scale_dtype")
    )


_linear = function("quantized_linear", *[POINTER] * 3, *[LONG] * 2, *[INT] * 2)


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix in panels, or several below each other, and the memory that `struct` points to."""

    struct: QuantizedStruct
    out_size: int
    in_size: int
    tensors: tuple[torch.Tensor | None, ...]

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self.struct)


def pack_quantized(matrix: QuantizedMatrix) -> Linear:
    """Return `x @ weight.T` for x of any dtype, whose products and sums are in float32.

    Each sum runs from the first product to the last, whatever else is computed.
    """
    return partial(_multiply, panels=pack_panels(matrix))


def pack_panels(matrix: QuantizedMatrix) -> Panels:
    """Return the panels of a matrix [out, in]; a scale of 0 fills the last one."""
    out_size, in_size = matrix.shape
    assert in_size % 8 == 0 and (matrix.group_size % 8 == 0 or matrix.group_size >= in_size)
    table = None if matrix.code == "float8" else torch.tensor(TABLES[matrix.code])
    parts = (
        _panels(matrix.codes.contiguous().view(torch.int32)),
        _panels(matrix.scales),
        None if matrix.zeros is None else _panels(matrix.zeros),
        table,
    )
    struct = QuantizedStruct(
        *(None if part is None else part.data_ptr() for part in parts),
        in_size,
        out_size,
        matrix.group_size,
        DTYPES[matrix.scales.dtype],
    )
    return Panels(struct, out_size, in_size, parts)


def pack_stacked(matrix: QuantizedMatrix) -> Panels:
    """Return the panels of stacked matrices below one another, each from a panel of its own on."""

    def below(rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows, (0, 0, 0, -rows.shape[1] % PANEL)).flatten(0, 1)

    return pack_panels(matrix.each(below))


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """Return [ceil(out / PANEL), n, PANEL] from [out, n]."""
    rows = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


def _multiply(x: torch.Tensor, panels: Panels) -> torch.Tensor:
    wide = x.float()
    assert wide.shape[1] == panels.in_size and wide.stride(1) == 1
    out = torch.empty(len(x), panels.out_size, dtype=x.dtype)
    _linear(
        panels.pointer,
        wide.data_ptr(),
        out.data_ptr(),
        len(x),
        wide.stride(0),
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out
