"""Published forms of quantized matrices, written number by number as their formats define them.

Each function takes a matrix [out, in] and returns the tensors of its module by their suffixes, and
the matrix that these stand for, which is computed from values and never from codes.
"""

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantized = tuple[Tensors, torch.Tensor]
Quantize = Callable[[torch.Tensor], Quantized]

GROUP = 32  # inputs that share a scale, where a test wants no other number of them
E4M3 = torch.float8_e4m3fn
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8_by_block(weight: torch.Tensor, group: int = GROUP) -> Quantized:
    """DeepSeek's: a scale for each square of `group` rows and inputs."""
    num_rows, num_inputs = (-(-size // group) for size in weight.shape)
    codes, numbers = torch.empty(weight.shape, dtype=E4M3), torch.empty_like(weight)
    scales = torch.empty(num_rows, num_inputs)
    for row in range(num_rows):
        for column in range(num_inputs):
            square = (
                slice(group * row, group * row + group),
                slice(group * column, group * column + group),
            )
            scales[row, column] = weight[square].abs().amax() / 448
            codes[square] = (weight[square] / scales[row, column]).to(E4M3)
            numbers[square] = codes[square].float() * scales[row, column]
    return {"weight": codes, "weight_scale_inv": scales}, numbers


def fp8_by_row(weight: torch.Tensor) -> Quantized:
    """compressed-tensors' float-quantized, by channel."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(E4M3)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def fp8_by_tensor(weight: torch.Tensor) -> Quantized:
    """One scale, beside one of activations."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(E4M3)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return tensors, codes.float() * scale


def _int4(
    weight: torch.Tensor, dtype: torch.dtype, group: int, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values 0..15 [out, in], zeros and scales [out, groups], and the numbers."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if has_zeros:
        scales = ((high - low) / 15).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (torch.maximum(-low, high) / 7.5).to(dtype)
        zeros = torch.full_like(low, 8)
    values = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    numbers = (values - zeros[:, :, None]) * scales.float()[:, :, None]
    return values.flatten(1).int(), zeros.int(), scales, numbers.flatten(1)


def _words(values: torch.Tensor, order: Collection[int] = range(8)) -> torch.Tensor:
    """Return [n, m / 8]: the i-th 4 bits of a word hold the value at its place order[i] of 8."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for i, place in enumerate(order):
        words |= values[:, place::8].long() << 4 * i
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(weight: torch.Tensor, group: int = GROUP) -> Quantized:
    """AutoAWQ's "gemm": words of 8 outputs, in the order in which its kernel unpacks them."""
    values, zeros, scales, numbers = _int4(weight, torch.float16, group, has_zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _words(values.T, order), "qzeros": _words(zeros.T, order)}
    return tensors | {"scales": scales.T.contiguous()}, numbers


def _gptq(weight: torch.Tensor, group: int, has_zeros: bool, less: int) -> Quantized:
    values, zeros, scales, numbers = _int4(weight, torch.float16, group, has_zeros)
    if has_zeros and less:  # the stored form has no zero of 0
        zeros = zeros.clamp(min=1)
        grouped = values.view(*scales.shape, group) - zeros[:, :, None]
        numbers = (grouped * scales.float()[:, :, None]).flatten(1)
    tensors = {
        "qweight": _words(values).T.contiguous(),
        "qzeros": _words((zeros - less).T),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }
    return tensors, numbers


def gptq(weight: torch.Tensor, group: int = GROUP) -> Quantized:
    """AutoGPTQ's symmetric form: words of 8 inputs, each zero stored less one."""
    return _gptq(weight, group, has_zeros=False, less=1)


def gptq_with_zeros(weight: torch.Tensor) -> Quantized:
    return _gptq(weight, GROUP, has_zeros=True, less=1)


def gptq_v2(weight: torch.Tensor) -> Quantized:
    return _gptq(weight, GROUP, has_zeros=True, less=0)


def packed(weight: torch.Tensor, group: int = GROUP) -> Quantized:
    """compressed-tensors' pack-quantized: words of 8 inputs, symmetric."""
    values, _, scales, numbers = _int4(weight, torch.bfloat16, group, has_zeros=False)
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": _words(values), "weight_scale": scales, "weight_shape": shape}
    return tensors, numbers


def packed_with_zeros(weight: torch.Tensor) -> Quantized:
    """The same with zeros, in words of 8 outputs."""
    values, zeros, scales, numbers = _int4(weight, torch.bfloat16, GROUP, has_zeros=True)
    tensors = {
        "weight_packed": _words(values),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": _words(zeros.T).T.contiguous(),
    }
    return tensors, numbers


def mxfp4(weight: torch.Tensor) -> Quantized:
    """gpt-oss's stacked experts [experts, out, in]: pairs of E2M1 and a power of two each 32."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-126, 127)
    scaled = groups / exponents.exp2()[..., None]
    steps = torch.tensor(FLOAT4)
    nearest = (scaled.abs()[..., None] - steps).abs().argmin(-1)
    numbers = steps[nearest] * scaled.sign() * exponents.exp2()[..., None]
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    tensors = {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}
    return tensors, numbers.flatten(-2)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_BY_GROUP = {"strategy": "group", "group_size": GROUP}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
# What config.json has beside the tensors of each form.
FORMS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "fp8 by block": (
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "fmt": "e4m3"},
        fp8_by_block,
    ),
    "fp8 by tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_by_tensor,
    ),
    "fp8 by row": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8_by_row,
    ),
    "awq": (_AWQ | {"version": "gemm", "modules_to_not_convert": None}, awq),
    "gptq": (_GPTQ | {"sym": True}, gptq),
    "gptq with zeros": (_GPTQ | {"sym": False}, gptq_with_zeros),
    "gptq v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq_v2),
    "packed": (_compressed("pack-quantized", symmetric=True, **_BY_GROUP), packed),
    "packed with zeros": (
        _compressed("pack-quantized", symmetric=False, **_BY_GROUP),
        packed_with_zeros,
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn"]}, mxfp4),
}


def is_matrix(name: str) -> bool:
    """Return True for a stored tensor that is quantized in published models."""
    return "_proj.weight" in name or (".mlp.experts." in name and "bias" not in name)


def quantize_model(source: Path, folder: Path, config: dict[str, Any], quantize: Quantize) -> None:
    """Write the model at `source` to `folder` with quantized matrices, as `config` has them.

    The model at `source` gets the numbers that the other stands for.
    """
    is_stacked = config["quant_method"] == "mxfp4"  # which has experts alone
    numbers, stored = load_file(source / "model.safetensors"), {}
    for name, weight in numbers.items():
        if not is_matrix(name) or (is_stacked and weight.dim() == 2):
            stored[name] = weight
        elif is_stacked:  # the files have [experts, out, in]
            tensors, expanded = quantize(weight.transpose(1, 2))
            stored |= {f"{name}_{suffix}": each for suffix, each in tensors.items()}
            numbers[name] = expanded.transpose(1, 2).contiguous()
        else:
            tensors, numbers[name] = quantize(weight)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": each for suffix, each in tensors.items()}
    save_file(numbers, source / "model.safetensors", {"format": "pt"})
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    contiguous = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    data = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": config}))
