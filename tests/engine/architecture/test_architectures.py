"""Every architecture of the engine: the tokens and the logits of transformers' eager pass."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.architecture.architectures import ARCHITECTURES
from tests.engine.parity import assert_computes_as, assert_greedy, generate, make_engine
from tests.engine.tiny_models import DENSE, MIXTURES, make_model


def test_every_architecture_has_a_tiny_model() -> None:
    assert {each.model_type for each in ARCHITECTURES.values()} == {*DENSE, *MIXTURES}


@pytest.mark.parametrize("model_type", DENSE)
def test_an_architecture_computes_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    assert_computes_as(tmp_path, make_model(tmp_path, model_type, **DENSE[model_type]))


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
    model = make_model(tmp_path, model_type, **DENSE[model_type])
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
