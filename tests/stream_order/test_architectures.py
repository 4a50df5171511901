"""A decode step of each architecture is recorded into a graph, and has the host wait for nothing.

One that is entered in a table is judged by itself. Weights are in bfloat16, in which a Hopper
multiplies the groups of a mixture's tokens.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine.architecture.architectures import ARCHITECTURES
from tandem.engine.core.engine import Engine
from tests.engine.tiny_models import DENSE, MIXTURES, make_model
from tests.engine.transformers_models.generic_architectures import QUICK, SIZES, SLOW
from tests.stream_order import scenes
from tests.stream_order.gpu import use_gpus

OPTIONS: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 1, "dtype": "bfloat16"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", [each.model_type for each in ARCHITECTURES.values()])
def test_no_step_of_the_engine_s_own_code_waits(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, model_type, **(DENSE | MIXTURES)[model_type])
    judge(lambda: scenes.make_engine(tmp_path, "cuda:0", **OPTIONS), caplog)


@pytest.mark.parametrize("kind", QUICK | SLOW)
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
