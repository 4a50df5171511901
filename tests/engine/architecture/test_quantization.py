"""The quantization_config of published models, and what is refused by its key."""

import json
from pathlib import Path

import pytest

from tandem.engine.architecture.config import load_model_config
from tandem.engine.architecture.quantization import METHODS
from tandem.runtime.errors import ModelError
from tests.engine.architecture.real_configs import REAL
from tests.engine.architecture.real_mixtures import MIXTURES
from tests.engine.architecture.real_quantized import AWQ, BLOCKS, GPTQ, PUBLISHED, W4A16, compressed

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
        (GPTQ | {"bits": 8}, "bits"),
        (GPTQ | {"bits": True}, "bits"),
        (GPTQ | {"group_size": 48}, "group_size"),
        (GPTQ | {"group_size": None}, "group_size"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "version"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 16}, "group_size"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size"),
        (BLOCKS | {"weight_block_size": [128, 100]}, "weight_block_size"),
        (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (W4A16 | {"config_groups": None}, "config_groups"),
        (W4A16 | {"config_groups": {}}, "config_groups"),
        (W4A16 | {"format": "marlin-24"}, "format"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
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
