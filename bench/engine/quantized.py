"""Whole prompts by quantized weights, beside the numbers that such codes stand for, in turns."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tandem.bench.engine.floors import prefill_flops
from tandem.bench.engine.rig import Workshop
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Bound, Figure, at_least, in_unit
from tandem.bench.report.setting import Setting
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.quantization import Form, Quantization
from tandem.engine.weights.weights import ModelWeights
from tandem.kernels.reference.quantized import BITS, Code, QuantizedMatrix

# Forms of files, and inputs that share a scale: those of Qwen3's FP8, of AWQ and of gpt-oss.
CODES: dict[Code, tuple[Form, int]] = {
    "float8": ("float8", 128),
    "int4": ("awq", 128),
    "float4": ("mxfp4", 32),
}
MEASURED: tuple[Code, ...] = ("float8", "int4")
NUM_TOKENS, TINY_NUM_TOKENS = 8192, 64
NUM_BLOCKS = 256  # of each pool


def run(setting: Setting) -> Iterator[Figure]:
    """Measure the same prompt by every form of the weights in every round."""
    plain, length = Workshop(setting), setting.size(NUM_TOKENS, TINY_NUM_TOKENS)
    workshops = {"numbers": plain}
    for code in MEASURED:
        workshops[code] = Workshop(setting, *with_codes(plain.model, plain.weights, code))
    rigs = {
        name: each.rig(
            max_num_seqs=1,
            max_num_batched_tokens=length,
            num_blocks=None if setting.is_dry else NUM_BLOCKS,
            cuda_graphs=False,
        )
        for name, each in workshops.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in rigs}
    for index in range(setting.num_warmups + num_rounds(setting)):
        for name, rig in rigs.items():
            records = rig.prefill(rig.prompt(length))
            if index >= setting.num_warmups:
                seconds[name].append(sum(each.device_s for each in records))
    floor = Bound("matmul", prefill_flops(plain.model, length))
    for name, found in seconds.items():
        label = f"prefill of {length} tokens, weights in {name}"
        yield Figure(f"prefill_{name}", label, "ms", in_unit(found, "ms"), bound=floor)
    for code in MEASURED:
        pairs = zip(seconds["numbers"], seconds[code], strict=True)
        rates = tuple(numbers_s / codes_s for numbers_s, codes_s in pairs)
        label = f"  rate by {code} to that by numbers"
        yield Figure(f"prefill_{code}_rate", label, "x", rates, at_least(0.9))


def with_codes(
    model: ModelConfig, weights: ModelWeights, code: Code
) -> tuple[ModelConfig, ModelWeights]:
    """Return a model with the matrices of all layers as codes."""
    form, group_size = CODES[code]
    names = ("qkv", "output", "gate_up", "down")
    layers = (
        replace(layer, **{name: _coded(getattr(layer, name), code, group_size) for name in names})  # type: ignore[arg-type]
        for layer in weights.layers
    )
    quantization = Quantization(form, group_size)
    return replace(model, quantization=quantization), replace(weights, layers=tuple(layers))


def _coded(weight: torch.Tensor, code: Code, group_size: int) -> QuantizedMatrix:
    """Return random codes in the shape of a matrix, none of which stands for more than it has."""
    out_size, in_size = weight.shape
    group_size, device = min(group_size, in_size), weight.device
    size = out_size, in_size * BITS[code] // 8
    codes = torch.randint(0, 96, size, dtype=torch.uint8, device=device)
    scales = torch.full((out_size, in_size // group_size), 0.1 * in_size**-0.5, device=device)
    zeros = torch.zeros_like(scales) if code == "int4" else None
    return QuantizedMatrix(code, codes, scales.half(), group_size, zeros)
