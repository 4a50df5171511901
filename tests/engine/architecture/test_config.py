"""Reading config.json: both generations of it, and refusals that name file and key."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.engine.architecture.architectures import LLAMA, QWEN2, QWEN3
from tandem.engine.architecture.config import load_model_config
from tandem.engine.architecture.rope_config import RopeConfig
from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.memory.kv_blocks import choose_max_model_len
from tandem.runtime.errors import ModelError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, **changes: Any) -> Path:
    data = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_a_llama_config_is_read_with_its_defaults(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, num_key_value_heads=...))
    assert (config.num_kv_heads, config.head_dim, config.architecture) == (8, 8, LLAMA)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, False)
    assert config.rope == RopeConfig(10_000.0)
    assert config.eos_token_ids == ()


def test_a_qwen2_config_uses_its_sliding_window_only_where_it_says_so(tmp_path: Path) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32_768}
    for changes in ({}, {"use_sliding_window": False}):
        assert load_model_config(write(tmp_path, **qwen2, **changes)).architecture is QWEN2
    windows = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}
    config = load_model_config(write(tmp_path, **(qwen2 | windows)))
    assert [config.layer_kind(layer).window for layer in range(2)] == [0, 512]


def test_a_qwen3_config_has_norms_of_its_heads_and_its_own_head_dim(tmp_path: Path) -> None:
    config = load_model_config(
        write(
            tmp_path,
            architectures=["Qwen3ForCausalLM"],
            head_dim=32,
            tie_word_embeddings=True,
            sliding_window=None,
            use_sliding_window=False,
            layer_types=["full_attention"] * 2,
        )
    )
    assert (config.architecture, config.head_dim) == (QWEN3, 32)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        (
            {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4}},
            RopeConfig(2e4, "linear", 4.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rotary_settings_are_read_in_the_old_form_and_the_new(
    tmp_path: Path, changes: dict[str, Any], rope: RopeConfig
) -> None:
    assert load_model_config(write(tmp_path, **changes)).rope == rope


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("positions", "changes", "expected"),
    [
        (1024, {}, 4096),  # as the cards of Qwen2.5 say
        (1280, {}, 4096),  # of Qwen3, with room for the answer
        (4096, {}, 4096),  # as published with YaRN
        (8192, {}, 8192),
        (1024, {"factor": 1.5}, 1536),
        (4096, {"factor": ...}, 4096),
        (1024, {"original_max_position_embeddings": ...}, 4096),
        (1024, {"rope_type": "linear"}, 1024),
        (1024, {"rope_type": "default"}, 1024),
    ],
)
@pytest.mark.parametrize("code", ["native", "transformers"])
def test_yarn_gives_a_model_the_positions_of_its_factor(
    code: Any, positions: int, changes: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    rope = {key: value for key, value in (YARN | changes).items() if value is not ...}
    write(tmp_path, max_position_embeddings=positions, rope_scaling=rope, model_type="llama")
    if code == "transformers" and "factor" not in rope:
        pytest.skip("transformers asks for a factor")
    config = choose_model_config(tmp_path, code)
    assert config.max_position_embeddings == expected
    engine = EngineConfig(model=str(tmp_path), max_model_len=expected)
    assert (
        choose_max_model_len(engine, config, num_blocks=expected // 16, block_size=16) == expected
    )


def test_a_window_of_the_first_context_is_one_within_the_context_of_yarn(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    assert not load_model_config(write(tmp_path, **changes)).layer_kind(0).window
    config = load_model_config(write(tmp_path, **changes, rope_scaling=YARN))
    assert config.layer_kind(0).window == 1024


def test_a_factor_that_gives_too_many_positions_is_refused(tmp_path: Path) -> None:
    write(tmp_path, rope_scaling=YARN | {"factor": 1e11})
    with pytest.raises(ModelError, match="rope_scaling: a factor of"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"torch_dtype": ...}, "float32"),
    ],
)
def test_the_dtype_has_two_names(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    assert load_model_config(write(tmp_path, **changes)).dtype == dtype


def test_end_of_text_ids_come_from_both_files(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 11]}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 9, 11)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architectures"),
        ({"architectures": ...}, "architectures"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 60}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"mlp_bias": 1}, "mlp_bias"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": [4]}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 3}}, "short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0] * 4}}, "short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1}}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_file_and_key(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load_model_config(write(tmp_path, **changes))
    assert caught.value.param == key
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: ")
    assert f"{key}: " in caught.value.message


def test_an_unknown_architecture_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Mistral"
    ):
        load_model_config(write(tmp_path, architectures=["GPT2LMHeadModel"]))


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_config_that_is_missing_or_no_json_object_is_named(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_an_engine_config_refuses_unknown_keys_and_devices() -> None:
    with pytest.raises(ValidationError):
        EngineConfig.model_validate({"blocksize": 16})
    with pytest.raises(ValidationError):
        EngineConfig(device="tpu")
    assert EngineConfig(threads=3).num_threads() == 3
    assert EngineConfig().num_threads() >= 1


def test_the_form_of_kv_depends_on_the_architecture_and_its_ropes_alone(tmp_path: Path) -> None:
    form = load_model_config(write(tmp_path)).kv_form
    assert form.startswith("LlamaForCausalLM, ")
    assert load_model_config(write(tmp_path, eos_token_id=7)).kv_form == form
    changes = (
        {"architectures": ["MistralForCausalLM"]},
        {"rope_theta": 5e5},
        {"attention_bias": True},
        {"num_attention_heads": 4},
    )
    forms = {load_model_config(write(tmp_path, **each)).kv_form for each in changes}
    assert len(forms - {form}) == len(changes)


def test_longrope_is_short_where_no_sequence_is_long(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = factors | {"type": "su", "original_max_position_embeddings": 128}
    config = load_model_config(write(tmp_path, rope_scaling=scaling))
    for longest, rope in ((128, (1.0,) * 4), (129, (2.0,) * 4)):
        short = config.for_length(longest)
        assert (short.rope.long_factors or short.rope.short_factors) == rope
        assert {short.layer_kind(layer).rope for layer in range(2)} == {short.rope}
    short, long = config.for_length(128).kv_form, config.for_length(129).kv_form
    assert "longrope for short sequences" in short and "longrope for long sequences" in long


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, [64, 0]),
        ({"sliding_window_pattern": "LG"}, [64, 0]),
        ({"sliding_window_pattern": "GL"}, [0, 64]),
        ({"sliding_window_pattern": 1}, [0, 0]),
        ({"sliding_window_pattern": 3}, [64, 64]),
        ({"sliding_window": None}, [0, 0]),
        ({"sliding_window": 1024}, [0, 0]),
    ],
)
def test_windows_are_listed_or_follow_a_pattern_and_end_before_the_longest_sequence(
    tmp_path: Path, changes: dict[str, Any], windows: list[int]
) -> None:
    exaone = {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 64}
    config = load_model_config(write(tmp_path, **(exaone | changes)))
    assert [config.layer_kind(layer).window for layer in range(2)] == windows


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", ["full_attention"]]}, "layer_types"),
        ({"sliding_window_pattern": "LX"}, "sliding_window_pattern"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"},
            "hidden_activation",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, "no_rope_layers"),
        (GEMMA2 | {"query_pre_attn_scalar": 1e-99}, "query_pre_attn_scalar"),
        (GEMMA2 | {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "mamba"},
            },
            "model_type",
        ),
    ],
)
def test_layers_that_are_not_supported_are_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    exaone = {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 64}
    with pytest.raises(ModelError) as caught:
        load_model_config(write(tmp_path, **(exaone | changes)))
    assert caught.value.param == key
    assert f"{key}: " in caught.value.message
