"""Architectures of transformers for tiny random models: what each sets beyond the sizes of all."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1,
}  # fmt: skip
LATENT: dict[str, Any] = EXPERTS | {
    "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Of several kinds: plain, two norms and windows, experts, keys and values of two sizes.
QUICK: dict[str, dict[str, Any]] = {
    "stablelm": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "qwen3_moe": EXPERTS,
    "deepseek_v3": LATENT,
}
SLOW: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "deepseek_v2": LATENT,
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8},
    "gemma": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "glm": {},
    "glm4": {},
    "gpt2": {"n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4},
    "gpt_neox": {},
    "gpt_oss": EXPERTS | {"sliding_window": 8},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoe": EXPERTS,
    "helium": {},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "llama": {"attention_bias": True},
    "llama4_text": EXPERTS | {"attention_chunk_size": 128, "intermediate_size_mlp": 96},
    "mistral": {"sliding_window": 8},
    "mixtral": EXPERTS,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": {},
    "phimoe": EXPERTS | {"sliding_window": 256},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 8},
}
# Their heads are normed, rotated and stored by one kernel. Others rotate neighbors or a part of a
# head, have norms over all heads or of another kind, or keys of several parts.
FUSED = {
    "apertus", "arcee", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "granitemoe",
    "hunyuan_v1_moe", "llama", "mistral", "mixtral", "olmo", "phi3", "phimoe", "qwen2", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
}  # fmt: skip
# A trace cannot follow how they make positions.
CALLED_AS_MODULES = {"opt"}
