"""Quantized models: the tokens and logits of transformers' eager pass over the expanded numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.models.parity import (
    assert_greedy,
    assert_same_logits,
    generate,
    generate_remotely,
    make_engine,
)
from tests.engine.models.quantizers import quantize_model
from tests.engine.models.tiny_models import make_model

_MOE = {"num_experts": 6, "moe_intermediate_size": 32, "num_experts_per_tok": 3}
_GPT_OSS = {"num_local_experts": 6, "sliding_window": 12, "intermediate_size": 64}
# A form, and an architecture that puts its matrices together in another way.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by block": ("qwen3_moe", _MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "fp8 by tensor": ("llama", {"mlp_bias": True}),
    "fp8 by row": ("phi3", {"tie_word_embeddings": True}),
    "awq": ("glm", {}),
    "gptq": ("qwen2", {}),
    "gptq with zeros": ("qwen3_moe", _MOE),
    "gptq v2": ("gemma2", {}),
    "packed": ("mistral", {"sliding_window": 12}),
    "packed with zeros": ("olmo2", {}),
    "mxfp4": ("gpt_oss", _GPT_OSS),
}


@pytest.mark.parametrize("form", CASES)
def test_a_quantized_model_computes_as_its_numbers_do(form: str, tmp_path: Path) -> None:
    """Token by token, in chunks, and prefilled remotely."""
    model_type, changes = CASES[form]
    make_model(tmp_path / "numbers", model_type, **changes)
    quantize_model(tmp_path / "numbers", tmp_path / "codes", form)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "numbers", attn_implementation="eager", dtype=torch.float32
    ).eval()
    engine = make_engine(tmp_path / "codes", max_num_batched_tokens=24, prefill_chunk_tokens=5)
    texts = generate(engine)
    assert_greedy(model, texts)
    assert generate_remotely(tmp_path / "codes") == texts
    assert_same_logits(engine, model, texts[3], 1e-4)
