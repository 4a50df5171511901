"""Matrices whose numbers are stored as codes of 8 or 4 bits, and their expansion."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

Code = Literal["float8", "int4", "float4"]

BITS: dict[Code, int] = {"float8": 8, "int4": 4, "float4": 4}
INPUT_GROUP = 128  # inputs of a row that share a scale where a product rounds them
LARGEST_FLOAT8, LEAST_MAGNITUDE = 448.0, 1e-10
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1
# The numbers that the 16 codes of 4 bits stand for.
TABLES: dict[Code, tuple[float, ...]] = {
    "int4": tuple(float(number) for number in range(-8, 8)),
    "float4": (*_MAGNITUDES, *(-number for number in _MAGNITUDES)),
}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [..., out, in]; a number is that of its code, less its zero, times its scale.

    Each `group_size` inputs of a row share a scale and, where there are any, a zero.
    """

    code: Code
    codes: torch.Tensor  # uint8 [..., out, in], or of 4 bits [..., out, in / 2], even inputs low
    scales: torch.Tensor  # [..., out, num_groups], of any floating dtype
    group_size: int  # inputs; a multiple of 8, or not below `in`
    zeros: torch.Tensor | None = None  # as scales
    # A product on a GPU rounds its inputs to float8; of float8 in groups of INPUT_GROUP or one.
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // BITS[self.code])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedMatrix":
        """Return the matrix after a `change` to the rows of codes, of scales and of zeros."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)

    def unbind(self) -> "list[QuantizedMatrix]":
        """Return the stacked matrices."""
        zeros = [None] * len(self.codes) if self.zeros is None else self.zeros.unbind()
        parts = zip(self.codes.unbind(), self.scales.unbind(), zeros, strict=True)
        return [replace(self, codes=each[0], scales=each[1], zeros=each[2]) for each in parts]


Matrix = torch.Tensor | QuantizedMatrix


def rounds_inputs(matrix: Matrix) -> bool:
    """Return True for a matrix of which a product on a GPU rounds its inputs."""
    return isinstance(matrix, QuantizedMatrix) and matrix.rounds_inputs


def expanded(matrix: Matrix) -> torch.Tensor:
    """Return the numbers of a quantized matrix in float32; any other matrix as it is."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    numbers = _numbers(matrix)
    *outer, in_size = matrix.shape
    groups = torch.arange(in_size, device=matrix.device) // matrix.group_size
    if matrix.zeros is not None:
        numbers -= matrix.zeros.float()[..., groups]
    return numbers.mul_(matrix.scales.float()[..., groups]).view(*outer, in_size)


def _numbers(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return the numbers that the codes stand for."""
    if matrix.code == "float8":
        return matrix.codes.view(torch.float8_e4m3fn).float()
    table = torch.tensor(TABLES[matrix.code], device=matrix.device)
    pairs = torch.stack([matrix.codes & 15, matrix.codes >> 4], -1)
    return table[pairs.flatten(-2).int()]


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in] in float32, each INPUT_GROUP rounded to the scaled numbers of float8."""
    in_size = x.shape[-1]
    padded = F.pad(x.float(), (0, -in_size % INPUT_GROUP))
    groups = padded.view(*x.shape[:-1], -1, INPUT_GROUP)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_MAGNITUDE) / LARGEST_FLOAT8
    codes = (groups * (1 / scales)).to(torch.float8_e4m3fn)
    return (codes.float() * scales).view(padded.shape)[..., :in_size]
