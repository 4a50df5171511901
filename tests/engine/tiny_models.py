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
