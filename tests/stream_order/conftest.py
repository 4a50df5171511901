"""Tests in this folder run the program's code for GPUs on tensors of the CPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.models.random_model import write_random_model
from tests.stream_order.gpu import Gpus, use_gpus

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]  # the fake stands for a GPU that is not here
else:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with use_gpus() as found:
        yield found


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers."""
    folder: Path = write_random_model(
        tmp_path_factory.mktemp("model"),
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=260,
    )
    return folder
