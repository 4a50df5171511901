"""Published configurations: their tensors by name, and with two narrow layers their logits."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine.architecture.config import ModelConfig, load_model_config
from tandem.engine.architecture.mixtures import OLMOE, QWEN2_MOE
from tandem.engine.architecture.rope import rope_tables
from tandem.engine.weights.weights import empty_weights, weight_parts
from tandem.runtime.errors import ModelError
from tests.engine.architecture.real_configs import REAL
from tests.engine.architecture.real_mixtures import MIXTURES
from tests.engine.parity import assert_same_logits, make_engine
from tests.engine.tiny_models import make_model

ALL = REAL | MIXTURES
# Their layers differ from another's of the table in sizes alone.
ALIKE = {
    "DeepSeek-R1-Distill-Qwen-7B", "Qwen3-0.6B", "Llama-3.2-1B", "Mistral-7B-v0.3", "SmolLM2-1.7B",
}  # fmt: skip
META = torch.device("meta")
NARROW = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 2}


def two_layers(name: str) -> dict[str, Any]:
    """Return the configuration of the text model, with the first layer and the last."""
    config = ALL[name].get("text_config", ALL[name]) | {"num_hidden_layers": 2}
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            config[key] = [config[key][0], config[key][-1]]
    return config


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


@pytest.mark.parametrize("name", ALL)
def test_the_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    whole = load(tmp_path, ALL[name])
    assert len(whole.layer_kinds) == whole.num_layers > 2 and whole.dtype == "bfloat16"
    text = two_layers(name)
    ours = load(tmp_path, ALL[name] | ({"text_config": text} if whole.text_config else text))
    weights = empty_weights(ours, torch.bfloat16, META)
    is_stacked = bool(ours.architecture.stacked_tensors)
    parts = weight_parts(weights, ours, is_stacked=is_stacked)
    shapes = {part.name: part.stored.shape for part in parts}
    model_type = text.pop("model_type", ours.architecture.model_type)
    with META:
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **text))
    assert type(theirs).__name__ == ours.architecture.name
    expected = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    if ours.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert shapes == expected


@pytest.mark.parametrize("name", [name for name in ALL if name not in ALIKE])
def test_two_narrow_layers_compute_as_in_transformers(name: str, tmp_path: Path) -> None:
    """With the published ropes, windows, heads and scales; LongRoPE beyond its first context."""
    whole = load(tmp_path, ALL[name])
    changes = two_layers(name) | NARROW
    changes |= {
        "head_dim": whole.head_dim,
        "num_attention_heads": whole.num_heads,
        "num_key_value_heads": whole.num_kv_heads,
    }
    if whole.mixture is not None:
        changes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    if whole.rope.long_factors or whole.architecture in (OLMOE, QWEN2_MOE):
        # Its heads are as wide as hidden_size tells.
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        changes["hidden_size"] = 2 * whole.head_dim
    if whole.rope.long_factors:
        changes["original_max_position_embeddings"] = 64
    model_type = changes.pop("model_type", whole.architecture.model_type)
    changes.setdefault("max_position_embeddings", whole.max_position_embeddings)
    model = make_model(tmp_path, model_type, gain=0.9, **changes)
    text = [7 * index % 500 + 3 for index in range(120)]
    assert_same_logits(make_engine(tmp_path), model, text)


ODD = (
    *(None, 0, -1, 3, 1e-300, 1e300, 10**30, float("nan"), True),
    *("x", "", [], [1], [[]], {}, {"a": 1}),
)


def keys_of(config: dict[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from keys_of(value, *before, key)


@pytest.mark.parametrize("name", ["Phi-4-mini", "Gemma-3-4B", "EXAONE-4.0-32B", "GLM-4.5-Air"])
def test_a_value_of_any_kind_is_taken_or_refused_by_file_and_key(name: str, tmp_path: Path) -> None:
    num_refused = 0
    for *before, key in keys_of(ALL[name]):
        for value in ODD:
            changed = copy.deepcopy(ALL[name])
            part = changed
            for each in before:
                part = part[each]
            part[key] = value
            try:
                tables = rope_tables(load(tmp_path, changed), 4, torch.float32, torch.device("cpu"))
            except ModelError as error:
                num_refused += 1
                assert str(tmp_path / "config.json") in error.message and error.param
            else:
                assert all(table.isfinite().all() for table in tables.values())
    assert num_refused > 50
