"""The weight matrices that are multiplied in C, and their layout."""

from functools import partial

import torch
import torch.nn.functional as F

from tandem.kernels.cpu.launch import PANEL, linear, multiplies_bfloat16
from tandem.kernels.cpu.quantized import pack_quantized
from tandem.kernels.reference.linear import Linear, activation_dtype
from tandem.kernels.reference.linear import pack_linear as pack_for_libraries
from tandem.kernels.reference.quantized import Matrix


def pack_linear(weight: Matrix) -> Linear:
    """Return `x @ weight.T` for x in activation_dtype(weight); `weight` is [out, in].

    Measured on two AMD cores with AVX-512, milliseconds for 65 matrices, 126 million numbers, and
    1, 8, 512 tokens: float32 12.5, 12.8, 317 by oneDNN and 11.2, 8.0, 301 in C; bfloat16 7.8, 8.4,
    156 and 5.9, 5.9, 146.
    """
    if not isinstance(weight, torch.Tensor):
        return pack_quantized(weight)
    if not is_for_c(weight):
        return pack_for_libraries(weight)
    return partial(linear, panels=pack_panels(weight), out_size=weight.shape[0])


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """Return [ceil(out / PANEL), in, PANEL] from [out, in]; zeros fill the last panel.

    For bfloat16, which is multiplied in pairs: [ceil(out / PANEL), in / 2, PANEL, 2].
    """
    out_size, in_size = weight.shape
    if num_lacking := -out_size % PANEL:  # else padding would copy all of it
        weight = F.pad(weight, (0, 0, 0, num_lacking))
    if weight.dtype == torch.bfloat16:
        return weight.reshape(-1, PANEL, in_size // 2, 2).permute(0, 2, 1, 3).contiguous()
    return weight.reshape(-1, PANEL, in_size).transpose(1, 2).contiguous()


def is_for_c(weight: torch.Tensor) -> bool:
    """Return True when the C kernel should multiply `weight`.

    False for bfloat16 on CPUs with AMX, where oneDNN is faster.
    """
    if weight.dtype == torch.float32:
        return True
    if weight.dtype != activation_dtype(weight) or weight.shape[1] % 2:
        return False
    return bool(multiplies_bfloat16()) and not torch.cpu._is_amx_tile_supported()
