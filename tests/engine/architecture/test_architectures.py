"""Every architecture of the engine: the tokens and the logits of transformers' eager pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.parity import assert_computes_as, assert_greedy, generate, make_engine
from tests.engine.tiny_models import LLAMA3_ROPE, YARN_ROPE, make_model

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"rope_scaling": YARN_ROPE, "attention_bias": True},
    "mistral": {"sliding_window": 12},
    "ministral": {"sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ministral3": {
        "rope_parameters": YARN_ROPE
        | {"rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    },
    "phi3": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
        "sliding_window": 20,
    },
    "gemma2": {
        "sliding_window": 12,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma3_text": {
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 12, "rope_scaling": YARN_ROPE | {"attention_factor": 1.2}},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "mlp_bias": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm": {},
    "glm4": {},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "exaone4": {"sliding_window": 12, "sliding_window_pattern": 3, "rope_scaling": LLAMA3_ROPE},
}


@pytest.mark.parametrize("model_type", CASES)
def test_an_architecture_computes_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    assert_computes_as(tmp_path, make_model(tmp_path, model_type, **CASES[model_type]))


@pytest.mark.parametrize(
    "is_old", [True, False], ids=["language_model.model", "model.language_model"]
)
@pytest.mark.parametrize(
    ("model_type", "wrapper"),
    [
        ("gemma3_text", "Gemma3ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_text_part_of_a_model_of_several_media_is_served(
    model_type: str, wrapper: str, is_old: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sizes are at text_config, its tensors under either of two names beside others."""
    model = make_model(tmp_path, model_type, **CASES[model_type])
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": [wrapper], "text_config": config}
    whole["tie_word_embeddings"] = config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    path = tmp_path / "model.safetensors"
    tensors = {"vision_tower.weight": torch.ones(3)}
    for name, tensor in load_file(path).items():
        new = name.replace("model.", "model.language_model.", 1)
        tensors[f"language_model.{name}" if is_old else new] = tensor
    save_file(tensors, path)
    assert_greedy(model, generate(make_engine(tmp_path)))
    assert "does not ask for" not in caplog.text
