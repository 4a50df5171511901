"""Mixtures of experts: the tokens and the logits of transformers' eager pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tandem.bench.engine.floors import linear_params
from tandem.engine.architecture.architectures import ARCHITECTURES
from tandem.engine.architecture.config import load_model_config
from tandem.engine.weights.weights import LayerWeights, load_weights
from tandem.runtime.errors import ModelError
from tests.engine.parity import assert_computes_as, make_engine
from tests.engine.tiny_models import MIXTURES, SIZES, make_model


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_computes_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    assert_computes_as(tmp_path, make_model(tmp_path, model_type, **MIXTURES[model_type]))


@pytest.mark.parametrize("model_type", MIXTURES)
def test_stacked_experts_load_as_those_that_are_stored_one_by_one(
    model_type: str, tmp_path: Path
) -> None:
    """As transformers names them in memory, and may store them."""
    model = make_model(tmp_path, model_type, **MIXTURES[model_type])
    config = load_model_config(tmp_path)
    path = tmp_path / "model.safetensors"
    before = set(load_file(path))
    published = load_weights(tmp_path, config, torch.float32, torch.device("cpu"))
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, path)
    assert set(load_file(path)) != before or model_type == "gpt_oss"
    stacked = load_weights(tmp_path, config, torch.float32, torch.device("cpu"))
    for ours, theirs in zip(stacked.layers, published.layers, strict=True):
        for slot in LayerWeights.__dataclass_fields__:
            one, other = getattr(ours, slot), getattr(theirs, slot)
            assert one is other is None or torch.equal(one, other), slot


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, "olmoe", **MIXTURES["olmoe"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.experts\.4\.up_proj"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("mixtral", {"num_local_experts": None}, "num_experts: missing"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok: 6 is above 5"),
        ("mixtral", {"num_experts_per_tok": 1 << 20}, "num_experts_per_tok: 1048576 is above 64"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: only silu"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers: must be a list"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: "),
        ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size: "),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: is set"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit: must be"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "gguf"}},
            "quant_method: 'gguf' is not",
        ),
        ("glm4_moe", {"n_group": 5}, "n_group: 5 does not divide n_routed_experts 12"),
        ("glm4_moe", {"topk_group": 9}, "topk_group: 9 is above 4"),
        (
            "glm4_moe",
            {"topk_group": 1, "num_experts_per_tok": 4},
            "num_experts_per_tok: 4 is above",
        ),
    ],
)
def test_a_mixture_that_cannot_be_computed_is_refused_by_its_key(
    model_type: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    made = AutoConfig.for_model(model_type, **(SIZES | MIXTURES[model_type])).to_dict()
    architecture = next(
        each.name for each in ARCHITECTURES.values() if each.model_type == model_type
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made | {"architectures": [architecture]}))
    load_model_config(tmp_path)
    whole = made | {"architectures": [architecture]} | changes
    path.write_text(json.dumps(whole))
    with pytest.raises(ModelError, match=expected):
        load_model_config(tmp_path)


def test_a_token_passes_its_own_experts_alone(tmp_path: Path) -> None:
    """All weights are held, and a step's floor counts those that it reads."""
    make_model(tmp_path, "mixtral", **MIXTURES["mixtral"])
    config = load_model_config(tmp_path)
    expert, attention = 3 * 64 * 48, 64 * 64 * 2 + 64 * 32 * 2
    assert linear_params(config) == 3 * (attention + 5 * 64 + 3 * expert)
    weights = load_weights(tmp_path, config, torch.float32, torch.device("cpu"))
    held = [getattr(weights.layers[0], slot) for slot in LayerWeights.__dataclass_fields__]
    num_held = sum(each.numel() for each in held if each is not None)
    assert num_held == attention + 5 * 64 + 5 * expert + 2 * 64
