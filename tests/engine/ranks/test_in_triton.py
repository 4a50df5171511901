"""Ranks with the kernels of GPUs, interpreted: the same bits at every number of them.

The interpreter multiplies by numpy, where a result's bits depend on its column of a tile. So ranks'
shares begin where a tile does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.engine.ranks.running import config_of
from tests.engine.tiny_models import make_model
from tests.engine.weights.quantizers import FORMS, quantize_model
from tests.kernels.tolerance import on_cpu

pytestmark = [on_cpu, pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_layers": 2,
    "head_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 128,
}
ONE_ORDER = {"deterministic": True, "tp_invariant": True}


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # in the other ranks too


def answers_and_pool(model: Path, tp: int, **settings: object) -> tuple[list[str], torch.Tensor]:
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "kernels": "triton"}
    runner = ModelRunner(config_of(model, tp, **sizes, **settings))
    try:
        engine = Engine(runner.config, runner)
        stop, params = (
            StopConditions(max_tokens=3, ignore_eos=True),
            SamplingParams(temperature=0.7, seed=5, logprobs=2),
        )
        for length in (19, 1):
            prompt = [3 + length] * length
            engine.add(Sequence(f"of {length}", prompt, length, params, stop))
        answers = []
        while engine.has_work:
            answers += [repr(output) for output in engine.step()]
        return answers, runner.kv_cache.tensor.clone()
    finally:
        runner.close()


def test_two_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    one, whole = answers_and_pool(model, 1, **ONE_ORDER)
    two, part = answers_and_pool(model, 2, **ONE_ORDER)
    assert one == two
    assert torch.equal(part, whole[: len(part), :, :, :1])
    # It does not follow from the products: in one chain of sums the bits are others.
    assert answers_and_pool(model, 1, deterministic=True)[0] != one


def test_ranks_in_the_order_of_their_number_answer_nearly_as_one_process(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    _, whole = answers_and_pool(model, 1)
    _, part = answers_and_pool(model, 2)
    assert torch.allclose(part, whole[: len(part), :, :, :1], atol=1e-5) and part.any()


def test_ranks_of_quantized_matrices(tmp_path: Path) -> None:
    make_model(tmp_path / "numbers", "llama", intermediate_size=160)  # in groups of 32
    quantize_model(tmp_path / "numbers", tmp_path / "codes", *FORMS["awq"])
    _, whole = answers_and_pool(tmp_path / "codes", 1)
    _, part = answers_and_pool(tmp_path / "codes", 2)
    heads = part.shape[3]
    assert torch.allclose(part, whole[: len(part), :, :, :heads], atol=1e-5) and part.any()


def test_ranks_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """Interleaved, with biases, which are added once."""
    make_model(tmp_path, "gpt_oss", num_local_experts=6, intermediate_size=64)
    _, whole = answers_and_pool(tmp_path, 1)
    _, part = answers_and_pool(tmp_path, 2)
    heads = part.shape[3]
    assert torch.allclose(part, whole[: len(part), :, :, :heads], atol=1e-5) and part.any()


def test_one_order_at_every_number_of_ranks_is_refused_where_products_have_several(
    tmp_path: Path,
) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    with pytest.raises(ConfigError, match=r"tp_invariant needs engine\.deterministic"):
        answers_and_pool(model, 1, tp_invariant=True)
