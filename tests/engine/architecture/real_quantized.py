"""The quantization_config of published models, beside the configuration that it belongs to."""

from typing import Any

from tandem.engine.architecture.quantization import Quantization

GPTQ = {
    "bits": 4, "damp_percent": 0.01, "desc_act": False, "group_size": 128, "quant_method": "gptq",
    "static_groups": False, "sym": True, "true_sequential": True,
}  # fmt: skip
AWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq",
    "version": "gemm", "zero_point": True,
}  # fmt: skip
BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

DYNAMIC_BLOCKS = Quantization("float8", 128, 128, rounds_inputs=True)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {"block_structure": None, "dynamic": False, "symmetric": True} | weights,
    }
    return {
        "config_groups": {"group_0": group}, "format": form, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {"format": "dense"},
    }  # fmt: skip


W4A16 = compressed(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128, actorder="weight"
)
FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
PUBLISHED: dict[str, tuple[str, dict[str, Any], Quantization]] = {
    "Qwen3-8B-FP8": ("Qwen3-8B", BLOCKS, DYNAMIC_BLOCKS),
    "Qwen3-30B-A3B-FP8": (
        "Qwen3-30B-A3B",
        BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
        DYNAMIC_BLOCKS,
    ),
    "Llama-3.1-8B FP8": ("Llama-3.1-8B", FP8, Quantization("float8")),
    "Llama-3.1-8B FP8 by AutoFP8": (
        "Llama-3.1-8B",
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        Quantization("float8"),
    ),
    "Llama-3.1-8B w4a16": ("Llama-3.1-8B", W4A16, Quantization("packed", 128)),
    "Llama-3.1-8B AWQ": ("Llama-3.1-8B", AWQ, Quantization("awq", 128, zeros="stored")),
    "Qwen2.5-7B-GPTQ-Int4": (
        "Qwen2.5-7B",
        GPTQ,
        Quantization("gptq", 128, zeros="stored less one"),
    ),
    "gpt-oss-20b": (
        "gpt-oss-20b",
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        Quantization("mxfp4", 32),
    ),
}
