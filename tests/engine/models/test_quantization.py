"""The quantization_config of published models, and what is refused by its key."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.models.config import load_model_config
from tandem.engine.models.quantization import METHODS, Quantization
from tandem.runtime.errors import ModelError
from tests.engine.models.real_configs import REAL
from tests.engine.models.real_mixtures import MIXTURES

_GPTQ = {
    "bits": 4,
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {"block_structure": None, "dynamic": False, "symmetric": True} | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
    }


_W4A16 = compressed(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128, actorder="weight"
)
_FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
PUBLISHED: dict[str, tuple[str, dict[str, Any], Quantization]] = {
    "Qwen3-8B-FP8": ("Qwen3-8B", _BLOCKS, Quantization("float8", 128, 128)),
    "Qwen3-30B-A3B-FP8": (
        "Qwen3-30B-A3B",
        _BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
        Quantization("float8", 128, 128),
    ),
    "Llama-3.1-8B FP8": ("Llama-3.1-8B", _FP8, Quantization("float8")),
    "Llama-3.1-8B FP8 by AutoFP8": (
        "Llama-3.1-8B",
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        Quantization("float8"),
    ),
    "Llama-3.1-8B w4a16": ("Llama-3.1-8B", _W4A16, Quantization("packed", 128)),
    "Llama-3.1-8B AWQ": ("Llama-3.1-8B", _AWQ, Quantization("awq", 128, zeros="stored")),
    "Qwen2.5-7B-GPTQ-Int4": (
        "Qwen2.5-7B",
        _GPTQ,
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
ALL = REAL | MIXTURES


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_this_form(name: str, tmp_path: Path) -> None:
    base, values, expected = PUBLISHED[name]
    whole = ALL[base] | {"quantization_config": values}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load_model_config(tmp_path)
    assert config.quantization == expected
    (tmp_path / "config.json").write_text(json.dumps(ALL[base]))
    plain = load_model_config(tmp_path)
    assert plain.quantization is None and plain.kv_form != config.kv_form


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method"),
        ({"quant_method": "gguf"}, "quant_method"),
        ({"load_in_8bit": True}, "quant_method"),
        ([4], "quantization_config"),
        (_GPTQ | {"bits": 8}, "bits"),
        (_GPTQ | {"bits": True}, "bits"),
        (_GPTQ | {"group_size": 48}, "group_size"),
        (_GPTQ | {"group_size": None}, "group_size"),
        (_GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (_GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic"),
        (_AWQ | {"version": "gemv"}, "version"),
        (_AWQ | {"zero_point": False}, "zero_point"),
        (_AWQ | {"group_size": 16}, "group_size"),
        (_BLOCKS | {"fmt": "e5m2"}, "fmt"),
        (_BLOCKS | {"weight_block_size": [128]}, "weight_block_size"),
        (_BLOCKS | {"weight_block_size": [128, 100]}, "weight_block_size"),
        (_BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (_W4A16 | {"config_groups": None}, "config_groups"),
        (_W4A16 | {"config_groups": {}}, "config_groups"),
        (_W4A16 | {"format": "marlin-24"}, "format"),
        (_W4A16 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
        (compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), "num_bits"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "num_bits"),
        (compressed("int-quantized", num_bits=4, type="int", strategy="channel"), "format"),
    ],
)
def test_a_form_that_is_not_served_is_refused_by_file_and_key(
    values: object, key: str, tmp_path: Path
) -> None:
    whole = REAL["Llama-3.1-8B"] | {"quantization_config": values}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError) as caught:
        load_model_config(tmp_path)
    assert caught.value.param == key
    assert str(tmp_path / "config.json") in caught.value.message
    if key == "quant_method":
        assert all(method in caught.value.message for method in METHODS)
