"""Tests in this folder run the program's code for GPUs on tensors of the CPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.models.random_model import write_random_model
from tests.engine.transformers_models.generic_architectures import EXPERTS, SIZES
from tests.stream_order import scenes
from tests.stream_order.gpu import Gpus, use_gpus

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]  # the fake stands for a GPU that is not here
else:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with use_gpus() as found:
        yield found


def write_model(folder: Path, num_layers: int) -> Path:
    written: Path = write_random_model(
        folder,
        num_layers=num_layers,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=260,
    )
    return written


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, for a handoff by layers."""
    return write_model(tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="package")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, for steps: a further one is launched as the first."""
    return write_model(tmp_path_factory.mktemp("shallow"), 1)


@pytest.fixture(scope="package")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> scenes.ByTransformers:
    """A mixture of experts of one layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", **(SIZES | EXPERTS | {"num_hidden_layers": 1}))
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("mixture")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return scenes.ByTransformers.load(folder, "float32")
