"""Ranks on GPUs: the same bits at every number of them, with graphs and overlapped steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.models.random_model import write_random_model
from tests.engine.ranks.test_in_triton import ONE_ORDER, answers_and_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 3,
    "head_dim": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 1400,  # unequal segments
}


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_two_gpus_have_the_bits_of_one(tmp_path: Path, cuda_graphs: bool) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    settings = ONE_ORDER | {"device": "cuda:0", "dtype": "bfloat16", "cuda_graphs": cuda_graphs}
    one, whole = answers_and_pool(model, 1, **settings)
    two, part = answers_and_pool(model, 2, **settings)
    assert one == two
    assert torch.equal(part, whole[: len(part), :, :, : part.shape[3]])


def test_two_gpus_answer_in_the_order_of_their_number(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    settings = {"device": "cuda:0", "dtype": "float32"}
    _, whole = answers_and_pool(model, 1, **settings)
    _, part = answers_and_pool(model, 2, **settings)
    assert torch.allclose(part, whole[: len(part), :, :, : part.shape[3]], atol=1e-2)
