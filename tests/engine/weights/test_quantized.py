"""Quantized models: the tokens and logits of transformers' eager pass over the expanded numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.engine.architecture.architectures import ARCHITECTURES
from tests.engine.architecture.real_configs import REAL
from tests.engine.architecture.real_mixtures import MIXTURES
from tests.engine.architecture.real_quantized import PUBLISHED
from tests.engine.parity import (
    assert_greedy,
    assert_same_logits,
    generate,
    generate_remotely,
    make_engine,
)
from tests.engine.tiny_models import make_model
from tests.engine.weights.quantizers import (
    FORMS,
    Quantize,
    awq,
    fp8_by_block,
    fp8_by_tensor,
    gptq,
    mxfp4,
    packed,
    quantize_model,
)

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


# Each is computed by the kernels of one of these.
FAST = ("fp8 by block", "awq", "mxfp4")
BY_128: dict[str, Quantize] = {
    "Qwen3-8B-FP8": partial(fp8_by_block, group=128),
    "Qwen3-30B-A3B-FP8": partial(fp8_by_block, group=128),
    "Llama-3.1-8B FP8": fp8_by_tensor,
    "Llama-3.1-8B FP8 by AutoFP8": fp8_by_tensor,
    "Llama-3.1-8B w4a16": partial(packed, group=128),
    "Llama-3.1-8B AWQ": partial(awq, group=128),
    "Qwen2.5-7B-GPTQ-Int4": partial(gptq, group=128),
    "gpt-oss-20b": mxfp4,
}
NARROW = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 512, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in CASES]
)
def test_a_quantized_model_computes_as_its_numbers_do(form: str, tmp_path: Path) -> None:
    """Token by token, in chunks, and prefilled remotely."""
    model_type, changes = CASES[form]
    make_model(tmp_path / "numbers", model_type, **changes)
    quantize_model(tmp_path / "numbers", tmp_path / "codes", *FORMS[form])
    model = eager(tmp_path / "numbers")
    engine = make_engine(tmp_path / "codes", max_num_batched_tokens=24, prefill_chunk_tokens=5)
    texts = generate(engine)
    assert_greedy(model, texts)
    assert generate_remotely(tmp_path / "codes") == texts
    assert_same_logits(engine, model, texts[3])


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_two_narrow_layers_of_a_published_model_compute_as_its_numbers_do(
    name: str, tmp_path: Path
) -> None:
    """With the published heads, ropes, windows, experts and groups of inputs."""
    base, config, _ = PUBLISHED[name]
    values = (REAL | MIXTURES)[base]
    changes = values | NARROW
    if "layer_types" in values:
        changes["layer_types"] = values["layer_types"][:2]
    if "moe_intermediate_size" in values:
        changes["moe_intermediate_size"] = 128
    model_type = ARCHITECTURES[changes.pop("architectures")[0]].model_type
    changes.pop("model_type", None)
    # Qwen2's heads are as wide as hidden_size tells.
    changes.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    make_model(tmp_path / "numbers", model_type, gain=0.9, **changes)
    quantize_model(tmp_path / "numbers", tmp_path / "codes", config, BY_128[name])
    text = [7 * index % 500 + 3 for index in range(120)]
    assert_same_logits(make_engine(tmp_path / "codes"), eager(tmp_path / "numbers"), text)


def eager(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()
