"""Tiny models of every architecture, made on the spot by transformers, with telling weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
# What each of the engine's architectures sets beyond the sizes of all.
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"rope_scaling": YARN_ROPE, "attention_bias": True},
    "mistral": {"sliding_window": 12},
    "ministral": {"sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ministral3": {
        "rope_parameters": YARN_ROPE
        | {"rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    },
    "phi3": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": _LONGROPE,
        "original_max_position_embeddings": 24,
        "max_position_embeddings": 128,
        "sliding_window": 20,
    },
    "gemma2": {
        "sliding_window": 12,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma3_text": {
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 12, "rope_scaling": YARN_ROPE | {"attention_factor": 1.2}},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "mlp_bias": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm": {},
    "glm4": {},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "exaone4": {"sliding_window": 12, "sliding_window_pattern": 3, "rope_scaling": LLAMA3_ROPE},
}
_EXPERTS = {"num_hidden_layers": 3, "num_experts_per_tok": 3, "intermediate_size": 48}
_OF_MIXTURES: dict[str, dict[str, Any]] = {
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
        "rope_parameters": YARN_ROPE | {"rope_theta": 150_000.0, "truncate": False},
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
MIXTURES = {model_type: _EXPERTS | each for model_type, each in _OF_MIXTURES.items()}


def make_model(folder: Path, model_type: str, gain: float = 1.5, **changes: Any) -> PreTrainedModel:
    """Write a model of `model_type` to `folder` and return it in float32, computing eagerly.

    Matrices make numbers larger by `gain`: more of it tells more, and rounds more.
    """
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    is_offset = model_type.startswith("gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                # Small, or a model with tied embeddings repeats its last token.
                weight.normal_(0, 0.1 * weight.shape[1] ** -0.5)
            elif weight.dim() >= 2:
                weight.normal_(0, gain * weight.shape[1] ** -0.5)
            elif name.endswith("norm.weight"):
                weight.normal_(0.0 if is_offset else 1.0, 0.2)
            else:
                weight.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.eval().save_pretrained(folder)
    return model
