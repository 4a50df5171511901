"""A decode step of an architecture is recorded into a graph, and has the host wait for nothing.

Weights are in bfloat16, in which a Hopper multiplies the groups of a mixture's tokens.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine.core.engine import Engine
from tests.engine.tiny_models import DENSE, MIXTURES, make_model
from tests.engine.transformers_models.generic_architectures import QUICK, SIZES, SLOW
from tests.stream_order import scenes
from tests.stream_order.gpu import use_gpus

# Of each kind of layer one: what waits for the host does so by the kind, not by the name.
OWN = (
    "llama", "ministral3", "phi3", "gemma2", "gemma3_text", "olmo2", "glm4", "exaone4",
    "granitemoe", "qwen2_moe", "gpt_oss", "glm4_moe",
)  # fmt: skip
BY_TRANSFORMERS = (*QUICK, "cohere2", "gpt2", "gpt_oss", "llama4_text", "opt", "phimoe")
OPTIONS: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 1, "dtype": "bfloat16"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", OWN)
def test_no_step_of_the_engine_s_own_code_waits(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, model_type, **(DENSE | MIXTURES)[model_type])
    judge(lambda: scenes.make_engine(tmp_path, "cuda:0", **OPTIONS), caplog)


@pytest.mark.parametrize("kind", BY_TRANSFORMERS)
def test_no_step_by_transformers_code_waits(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.for_model(kind, **(SIZES | (QUICK | SLOW)[kind]))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = scenes.ByTransformers.load(tmp_path, "bfloat16")
    judge(lambda: model.make_engine("cuda:0", **OPTIONS), caplog)


def judge(make_engine: Callable[[], Engine], caplog: pytest.LogCaptureFixture) -> None:
    """Compute a prompt and two answers by an engine on a GPU; fail if the host waits for one."""
    caplog.set_level(logging.WARNING)
    with use_gpus() as gpus:
        scenes.run(make_engine(), scenes.sequence("a", 3))
    assert gpus.order.verdicts == []
    assert "are not recorded" not in caplog.text
