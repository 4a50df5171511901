import json
from pathlib import Path

import pytest

from tandem.engine.config import EngineConfig
from tandem.launch.doctor.check_model import check_model
from tandem.models.paths import BUNDLED_MODEL
from tandem.models.random_model import write_random_model
from tests.engine.weights.quantizers import FORMS, quantize_model


def test_a_model_has_its_code_its_bytes_and_the_tokens_that_fit() -> None:
    config = EngineConfig(device="cpu", kv_memory_bytes=2**20)
    code, memory = check_model(str(BUNDLED_MODEL), config)
    assert (code.grade, memory.grade) == ("ok", "ok")
    assert "native, runs in float32" in code.detail
    values = json.loads((BUNDLED_MODEL / "config.json").read_text())
    heads, layers = values["num_key_value_heads"], values["num_hidden_layers"]
    token_bytes = 2 * heads * values["head_dim"] * layers * 4
    assert f"{token_bytes:,} bytes of KV per token" in memory.detail
    assert memory.detail.endswith(f"{2**20 // token_bytes:,} as configured")


def test_quantized_weights_have_their_form_and_the_bytes_of_their_codes(tmp_path: Path) -> None:
    numbers, codes = tmp_path / "numbers", tmp_path / "codes"
    write_random_model(numbers, dtype="bfloat16", hidden_size=256, intermediate_size=8192)
    quantize_model(numbers, codes, *FORMS["fp8 by row"])
    config = EngineConfig(device="cpu", dtype="bfloat16", kv_memory_bytes=2**20)
    code, memory = check_model(str(codes), config)
    assert code.detail.endswith("native, FP8, runs in bfloat16")
    # Two layers of feed-forward matrices, with 6 million numbers each.
    assert "0.01 GiB of weights" in memory.detail
    *_, plain = check_model(str(numbers), config)
    assert "0.02 GiB of weights" in plain.detail


def test_a_long_sequence_of_a_model_with_windows_takes_less_per_token(tmp_path: Path) -> None:
    path = write_random_model(tmp_path) / "config.json"  # one of its two layers gets a window
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | windows))
    config = EngineConfig(device="cpu", kv_memory_bytes=2**20, max_model_len=1024)
    *_, memory = check_model(str(tmp_path), config)
    layer_bytes = 2 * 2 * 16 * 4  # of a token
    assert f"{2 * layer_bytes:,} bytes of KV per token" in memory.detail
    long_bytes = layer_bytes + -(-129 * layer_bytes // 1024)  # two windows and the rest of a block
    assert f"{long_bytes} in sequences of 1,024" in memory.detail
    assert memory.detail.endswith(f"{2**20 // long_bytes:,} as configured")


def test_too_little_memory_for_one_block_is_a_failure() -> None:
    config = EngineConfig(device="cpu", kv_memory_bytes=1)
    *_, memory = check_model(str(BUNDLED_MODEL), config)
    assert (memory.subject, memory.grade) == ("model memory", "fail")


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((BUNDLED_MODEL / "config.json").read_bytes())
    found = [each for each in check_model(str(tmp_path), EngineConfig(device="cpu")) if each.remedy]
    assert [each.grade for each in found] == ["fail", "warn"]
    assert "tokenizer.json" in found[0].detail and "safetensors" in found[1].detail


@pytest.mark.parametrize("impl", ["native", "auto"])
def test_a_model_that_is_refused_has_the_reason(tmp_path: Path, impl: str) -> None:
    values = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (finding,) = check_model(str(tmp_path), EngineConfig(device="cpu", model_impl=impl))
    assert finding.grade == "fail"
    reason = "not supported" if impl == "native" else "an encoder with a decoder"
    assert reason in finding.detail
