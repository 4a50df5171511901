"""Mixtures of experts: the tokens and the logits of transformers' eager pass."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.parity import (
    NUM_TOKENS,
    assert_greedy,
    assert_same_logits,
    generate,
    generate_remotely,
    make_engine,
    prompts,
    sequence,
)
from tests.engine.models.tiny_models import make_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_hidden_layers": 3, "num_experts_per_tok": 3, "intermediate_size": 48}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "sliding_window": 20},
    "qwen3_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
    },
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
        "mlp_only_layers": [0],
    },
    "olmoe": {"num_experts": 7},
    "granitemoe": {
        "num_local_experts": 5,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "sliding_window": 12,
        "rope_parameters": YARN | {"rope_theta": 150_000.0, "truncate": False},
    },
    "glm4_moe": {
        "n_routed_experts": 12,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
        "use_qk_norm": True,
    },
}


@pytest.mark.parametrize("model_type", CASES)
def test_a_mixture_computes_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    """In ragged batches, in chunks, over a cached prefix, prefilled remotely; logits to 1e-4."""
    model = make_model(tmp_path, model_type, **(_EXPERTS | CASES[model_type]))
    engine = make_engine(tmp_path, max_num_batched_tokens=24, prefill_chunk_tokens=5)
    texts = generate(engine)
    assert_greedy(model, texts)
    assert len({token for text in texts for token in text[-NUM_TOKENS:]}) > NUM_TOKENS
    assert engine.prefix_hit(sequence(9, prompts()[3])) == 40
    assert generate(engine) == texts
    assert generate_remotely(tmp_path) == texts
    assert_same_logits(engine, model, texts[3], 1e-4)
