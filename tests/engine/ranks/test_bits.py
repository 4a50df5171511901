"""A model has the same bits at every number of ranks, in its answers and in its KV pool."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.execution.model_runner import ModelRunner
from tandem.kernels.cpu.linear import is_for_c
from tandem.models.random_model import write_random_model
from tests.engine.ranks.running import bits_of, config_of
from tests.engine.tiny_models import make_model
from tests.engine.weights.quantizers import FORMS, quantize_model

SHAPE: dict[str, Any] = {"vocab_size": 333, "hidden_size": 56, "num_layers": 3, "head_dim": 16}


def bits_at(model: Path, tp: int, **settings: object) -> tuple[str, str]:
    runner = ModelRunner(config_of(model, tp, **settings))
    try:
        return bits_of(runner, runner.model_config.vocab_size)
    finally:
        runner.close()


def test_two_ranks_of_a_model_of_two_kv_heads(tmp_path: Path) -> None:
    """Of 14 query heads, a width of 76 in unequal segments, and an odd vocabulary."""
    shape = SHAPE | {"num_heads": 14, "num_kv_heads": 2, "intermediate_size": 76}
    model = write_random_model(tmp_path, **shape)
    one, two = bits_at(model, 1), bits_at(model, 2)
    assert one == two
    # It does not follow from the products: in one chain of sums the bits are others.
    assert bits_at(model, 1, tp_invariant=False) != one


@pytest.mark.slow
@pytest.mark.timeout(400)  # eight processes load PyTorch, perhaps on two cores
@pytest.mark.parametrize(
    ("tp", "dtype"), [(2, "bfloat16"), (4, "float32"), (4, "bfloat16"), (8, "float32")]
)
def test_more_ranks_and_other_numbers(tmp_path: Path, tp: int, dtype: str) -> None:
    if not is_for_c(torch.empty(2, 2, dtype=getattr(torch, dtype))):
        pytest.skip(f"this processor multiplies {dtype} elsewhere")
    shape = SHAPE | {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 9728}
    model = write_random_model(tmp_path, tie_word_embeddings=False, **shape)
    assert bits_at(model, tp, dtype=dtype, threads=1) == bits_at(model, 1, dtype=dtype)


# A form, an architecture and a width. Where a rank has a single head of 16, attention's outputs are
# parted within a group of 32 inputs that share a scale.
QUANTIZED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fp8 by block": ("qwen3", 2, {"intermediate_size": 160}),  # in 5 groups
    "fp8 by row": ("phi3", 2, {}),  # packed matrices
    "fp8 by tensor": ("llama", 2, {"mlp_bias": True}),
    "awq": ("llama", 4, {"num_key_value_heads": 4, "intermediate_size": 192}),
    "gptq with zeros": ("qwen2", 2, {"tie_word_embeddings": False}),
    "packed": ("gemma2", 2, {"sliding_window": 20}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", QUANTIZED)
def test_ranks_of_quantized_matrices(tmp_path: Path, form: str) -> None:
    model_type, tp, changes = QUANTIZED[form]
    make_model(tmp_path / "numbers", model_type, **changes)
    quantize_model(tmp_path / "numbers", tmp_path / "codes", *FORMS[form])
    assert bits_at(tmp_path / "codes", tp) == bits_at(tmp_path / "codes", 1)


_MOE: dict[str, Any] = {"num_experts": 6, "moe_intermediate_size": 48, "num_experts_per_tok": 3}
_GPT_OSS = {"num_local_experts": 6, "sliding_window": 12, "intermediate_size": 96}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("qwen3_moe", _MOE | {"mlp_only_layers": [1]}),
    "beside a shared expert": ("qwen2_moe", _MOE | {"shared_expert_intermediate_size": 40}),
    "interleaved, transposed": ("gpt_oss", _GPT_OSS),
    "mxfp4": ("gpt_oss", _GPT_OSS),
    "fp8 by block": ("qwen3_moe", _MOE | {"moe_intermediate_size": 96}),
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("", "float32"),
        *[pytest.param(form, "float32", marks=pytest.mark.slow) for form in list(MIXTURES)[1:]],
        pytest.param("", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_mixture_of_experts(tmp_path: Path, form: str, dtype: str) -> None:
    if not is_for_c(torch.empty(2, 2, dtype=getattr(torch, dtype))):
        pytest.skip(f"this processor multiplies {dtype} elsewhere")
    model_type, changes = MIXTURES[form]
    folder = tmp_path / "numbers"
    make_model(folder, model_type, **changes)
    if form in FORMS:
        quantize_model(folder, tmp_path / "codes", *FORMS[form])
        folder = tmp_path / "codes"
    assert bits_at(folder, 2, dtype=dtype) == bits_at(folder, 1, dtype=dtype)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("tp", "num_kv_heads"), [(4, 2), (8, 2), (4, 1)])
def test_ranks_share_a_kv_head_where_there_are_fewer(
    tmp_path: Path, tp: int, num_kv_heads: int
) -> None:
    shape = SHAPE | {"num_heads": 8, "num_kv_heads": num_kv_heads, "intermediate_size": 76}
    model = write_random_model(tmp_path, **shape)
    assert bits_at(model, tp, threads=1) == bits_at(model, 1)


@pytest.mark.slow
def test_overlapped_steps_whose_tokens_are_not_yet_known(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    found = {bits_at(model, tp, overlap=overlap)[0] for tp in (1, 2) for overlap in (False, True)}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),  # biases follow the sum, once
        ("qwen2", {}),
        ("phi3", {}),  # packed matrices
        ("gemma2", {"sliding_window": 20}),  # windows, caps, norms after the outputs
    ],
)
def test_two_ranks_of_other_architectures(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    make_model(tmp_path, model_type, **changes)
    assert bits_at(tmp_path, 2) == bits_at(tmp_path, 1)
