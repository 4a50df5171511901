"""The architectures that the engine runs, as data, read by config.py, weights.py and decoder.py.

To add one, list the tensors of its layers and how it varies, and enter it in ARCHITECTURES.
Weights, random weights, the figures of benchmarks and docs/models.md follow these tables.
"""

from tandem.engine.architecture.layer_parts import (
    ATTENTION_BIAS,
    DENSE,
    GEMMA_NORMS,
    GLM4_NORMS,
    MLP,
    MLP_BIAS,
    OUTPUT,
    PACKED_MLP,
    PACKED_QKV,
    POST_NORMS,
    PRE_NORMS,
    QK_NORM,
    QKV,
    WIDE_QK_NORM,
    output_bias,
    qkv_bias,
)
from tandem.engine.architecture.mixtures import MIXTURES
from tandem.engine.architecture.spec import Architecture, Windows

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    DENSE + ATTENTION_BIAS + MLP_BIAS,
    models="Llama 2 and 3, DeepSeek-R1-Distill-Llama, SmolLM2, TinyLlama",
)
_QWEN_WINDOWS = Windows(first_key="max_window_layers", asked=True)
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    DENSE + qkv_bias(flag=""),
    defaults={"max_window_layers": 28, "sliding_window": 4096},
    windows=_QWEN_WINDOWS,
    models="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    DENSE + QK_NORM + ATTENTION_BIAS,
    defaults={"head_dim": 128, "max_window_layers": 28, "sliding_window": 4096},
    windows=_QWEN_WINDOWS,
    models="Qwen3",
)
MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    DENSE,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=Windows(by_layer_types=False),
    models="Mistral 7B, Nemo, Small",
)
MINISTRAL = Architecture(
    "MinistralForCausalLM",
    "ministral",
    DENSE,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=Windows(),
    models="Ministral",
)
MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    "ministral3",
    DENSE,
    reads=("llama_4_scaling_beta",),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    windows=Windows(by_layer_types=False),
    models="Ministral 3",
)
PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    PRE_NORMS + PACKED_QKV + OUTPUT + PACKED_MLP,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    windows=Windows(by_layer_types=False),
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
)
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_READS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    "gemma2",
    GEMMA_NORMS + QKV + OUTPUT + MLP + ATTENTION_BIAS,
    reads=_GEMMA_READS,
    defaults=_GEMMA_DEFAULTS
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    windows=Windows(full_every=2),
    norm_offset=1.0,
    scales_embedding=True,
    models="Gemma 2",
)
GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    GEMMA_NORMS + QKV + QK_NORM + OUTPUT + MLP + ATTENTION_BIAS,
    reads=_GEMMA_READS,
    defaults=_GEMMA_DEFAULTS
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    windows=Windows(full_every=6, full_every_key="sliding_window_pattern"),
    local_rope="rope_local_base_freq",
    norm_offset=1.0,
    scales_embedding=True,
    models="Gemma 3",
)
OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    "olmo2",
    POST_NORMS + QKV + WIDE_QK_NORM + OUTPUT + MLP + ATTENTION_BIAS,
    defaults={"rms_norm_eps": 1e-5},
    models="OLMo 2",
)
OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    "olmo3",
    POST_NORMS + QKV + WIDE_QK_NORM + OUTPUT + MLP + ATTENTION_BIAS,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    windows=Windows(full_every=4),
    local_rope="rope_theta",
    models="OLMo 3",
)
GRANITE = Architecture(
    "GraniteForCausalLM",
    "granite",
    DENSE + ATTENTION_BIAS + MLP_BIAS,
    reads=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    defaults={"attention_multiplier": 1.0},
    models="Granite 3",
)
SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    "smollm3",
    DENSE + ATTENTION_BIAS + MLP_BIAS,
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    windows=Windows(asked=True, of_no_rope=True),
    no_rope="no_rope_layers",
    models="SmolLM3",
)
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
GLM4 = Architecture(
    "Glm4ForCausalLM",
    "glm4",
    GLM4_NORMS + QKV + qkv_bias() + OUTPUT + PACKED_MLP,
    defaults=_GLM_DEFAULTS,
    rope_interleaved=True,
    models="GLM-4-0414, GLM-Z1",
)
GLM = Architecture(
    "GlmForCausalLM",
    "glm",
    PRE_NORMS + QKV + qkv_bias() + OUTPUT + PACKED_MLP,
    defaults=_GLM_DEFAULTS,
    rope_interleaved=True,
    models="GLM-4-9B, GLM-Edge",
)
SEED_OSS = Architecture(
    "SeedOssForCausalLM",
    "seed_oss",
    DENSE + qkv_bias() + output_bias("attention_out_bias") + MLP_BIAS,
    defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    models="Seed-OSS",
)
EXAONE4 = Architecture(
    "Exaone4ForCausalLM",
    "exaone4",
    POST_NORMS + QKV + QK_NORM + OUTPUT + MLP,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    windows=Windows(full_every=4, full_every_key="sliding_window_pattern"),
    no_rope="full_attention",
    models="EXAONE 4.0",
)

_LLAMAS = (LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL, MINISTRAL3, PHI3, GRANITE, SMOLLM3, SEED_OSS)
_OTHERS = (GEMMA2, GEMMA3, OLMO2, OLMO3, GLM, GLM4, EXAONE4)
ARCHITECTURES = {each.name: each for each in _LLAMAS + _OTHERS + MIXTURES}

# Models of several media whose text part, at text_config, is one of these architectures.
WITH_TEXT_CONFIG = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
