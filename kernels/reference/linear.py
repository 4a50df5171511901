"""Multiplication by a weight matrix, laid out for the present CPU."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from tandem.kernels.reference.quantized import Matrix, expanded

Linear = Callable[[torch.Tensor], torch.Tensor]  # [num_tokens, in] |-> [num_tokens, out]

# Below this size oneDNN's dispatch, some 25 us, costs more than its layout saves.
LEAST_PACKED_BYTES = 2 * 2**20
# oneDNN's layout for one token is slow for more, and this one is not for one.
PACKED_FOR_TOKENS = 16
LARGEST_FLOAT16 = torch.finfo(torch.float16).max


def activation_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the activations beside `weight`: on most CPUs float32."""
    if weight.device.type != "cpu" or _is_native(weight):
        return weight.dtype
    return torch.float32


def pack_linear(weight: Matrix) -> Linear:
    """Return `x @ weight.T` for x in activation_dtype(weight); `weight` is [out, in].

    Codes of a quantized matrix are expanded once: the product reads float32.

    On a CPU the function may own a copy and not keep `weight` alive. Measured on one Zen 3 core,
    milliseconds for 16 layers of 25 MB and 1, 8, 512 tokens: float32 29, 86, 1540 as it stands and
    31, 62, 1560 in oneDNN's layout; bfloat16 24, 178 and far more as it stands and 18, 31, 1310
    packed as float16.
    """
    if not isinstance(weight, torch.Tensor):
        weight = expanded(weight)
        return partial(_linear_float32, weight=weight)
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    if _is_native(weight):
        return partial(_linear_onednn, packed=_reordered(weight))
    if weight.dtype != torch.float32 and _fits_float16(weight):
        return _packed_float16(weight)
    weight = weight.float()
    if weight.nbytes < LEAST_PACKED_BYTES or not _has_onednn():
        return partial(F.linear, weight=weight)
    return partial(_linear_onednn, packed=_reordered(weight))


def _linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), weight).to(x.dtype)


def _is_native(weight: torch.Tensor) -> bool:
    """Return True when this CPU multiplies bfloat16 by bfloat16."""
    if weight.dtype != torch.bfloat16 or not _has_onednn():
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_TOKENS)
    return packed


def _linear_onednn(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def _fits_float16(weight: torch.Tensor) -> bool:
    """Return True when FBGEMM can hold `weight`.

    A bfloat16 number from 2^-17 to 65504 is exact in float16, and a smaller one off by 2^-25.
    """
    engines: list[str] = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and bool(weight.abs().amax() <= LARGEST_FLOAT16)


def _packed_float16(weight: torch.Tensor) -> Linear:
    """Return FBGEMM's product: float16 weights, widened in registers, multiplied in float32."""
    if torch.get_num_threads() > 1 or not hasattr(torch, "fbgemm_pack_gemm_matrix_fp16"):
        packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        return partial(torch.ops.quantized.linear_dynamic_fp16, W_prepack=packed)
    # On one thread the same function without its dispatch takes 25 us less a call.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the removal of both, once each
        one = partial(_linear_float16, packed=torch.fbgemm_pack_gemm_matrix_fp16(weight.float()))
        one(torch.zeros(1, weight.shape[1]))
    return one


def _linear_float16(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, None)
