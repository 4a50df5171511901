"""Configurations of published models, as far as a decoder depends on them."""

import json
from typing import Any

_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_NUMBERS = (
    *("hidden_size", "intermediate_size", "vocab_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "rope_theta", "rms_norm_eps"),
)


def config(architecture: str, numbers: str, **more: Any) -> dict[str, Any]:
    """Return a config.json; `numbers` are those of _NUMBERS, in their order."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **dict(zip(_NUMBERS, map(json.loads, numbers.split()), strict=True)),
        **more,
    }


_QWEN2 = {"sliding_window": 131_072, "use_sliding_window": False, "max_window_layers": 28}
_QWEN3 = {"head_dim": 128, "sliding_window": None, "use_sliding_window": False}
_QWEN3_8B = "4096 12288 151936  36 32 8"
_THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]

REAL: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": config("Qwen2", "3584 18944 152064  28 28 4  32768 1e6 1e-6", **_QWEN2),
    "DeepSeek-R1-Distill-Qwen-7B": config(
        "Qwen2", "3584 18944 152064  28 28 4  131072 1e4 1e-6", **_QWEN2 | {"sliding_window": 4096}
    ),
    "Qwen3-0.6B": config(
        "Qwen3", "1024 3072 151936  28 16 8  40960 1e6 1e-6", tie_word_embeddings=True, **_QWEN3
    ),
    "Qwen3-8B": config("Qwen3", f"{_QWEN3_8B}  40960 1e6 1e-6", **_QWEN3),
    "Qwen3-8B with YaRN": config(
        "Qwen3",
        f"{_QWEN3_8B}  131072 1e6 1e-6",
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
        **_QWEN3,
    ),
    "Llama-3.1-8B": config(
        "Llama",
        "4096 14336 128256  32 32 8  131072 5e5 1e-5",
        rope_scaling=_LLAMA31_ROPE,
        eos_token_id=[128_001, 128_008, 128_009],
    ),
    "Llama-3.2-1B": config(
        "Llama",
        "2048 8192 128256  16 32 8  131072 5e5 1e-5",
        head_dim=64,
        rope_scaling=_LLAMA31_ROPE | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": config(
        "Mistral", "4096 14336 32768  32 32 8  32768 1e6 1e-5", sliding_window=None
    ),
    "Mistral-Small-3.2": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": config(
            "Mistral",
            "5120 32768 131072  40 32 8  131072 1e9 1e-5",
            head_dim=128,
            sliding_window=None,
            model_type="mistral",
        ),
    },
    "Phi-4": config(
        "Phi3",
        "5120 17920 100352  40 40 10  16384 250000 1e-5",
        original_max_position_embeddings=16_384,
        rope_scaling=None,
        sliding_window=None,
    ),
    "Phi-4-mini": config(
        "Phi3",
        "3072 8192 200064  32 24 8  131072 1e4 1e-5",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        # Their range, and their growth from one to the next, are those of the published ones.
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [min(1.118320672**angle, 64.0) for angle in range(48)],
        },
        sliding_window=262_144,
        tie_word_embeddings=True,
    ),
    "Gemma-2-9B": config(
        "Gemma2",
        "3584 14336 256000  42 16 8  8192 1e4 1e-6",
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "Gemma-3-4B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "OLMo-3-7B": config(
        "Olmo3",
        "4096 11008 100278  32 32 32  65536 5e5 1e-6",
        sliding_window=4096,
        layer_types=_THREE_TO_ONE * 8,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Granite-3.3-8B": config(
        "Granite",
        "4096 12800 49159  40 32 8  131072 1e7 1e-5",
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=16.0,
        tie_word_embeddings=True,
    ),
    "SmolLM2-1.7B": config(
        "Llama", "2048 8192 49152  24 32 32  8192 130000 1e-5", tie_word_embeddings=True
    ),
    "SmolLM3-3B": config(
        "SmolLM3",
        "2048 11008 128256  36 16 4  65536 5e6 1e-6",
        no_rope_layers=[1, 1, 1, 0] * 9,
        layer_types=["full_attention"] * 36,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "TinyLlama-1.1B": config("Llama", "2048 5632 32000  22 32 4  2048 1e4 1e-5"),
    "GLM-4-9B": config(
        "Glm4",
        "4096 13696 151552  40 32 2  32768 1e4 1e-5",
        head_dim=128,
        partial_rotary_factor=0.5,
        attention_bias=True,
        eos_token_id=[151_329, 151_336, 151_338],
    ),
    "Seed-OSS-36B": config(
        "SeedOss",
        "5120 27648 155136  64 80 8  524288 1e7 1e-6",
        head_dim=128,
        rope_scaling={"rope_type": "default"},
        attention_bias=True,
        attention_out_bias=False,
    ),
    "EXAONE-4.0-32B": config(
        "Exaone4",
        "5120 27392 102400  64 40 8  131072 1e6 1e-5",
        head_dim=128,
        rope_scaling=_LLAMA31_ROPE | {"factor": 16.0},
        sliding_window=4096,
        sliding_window_pattern="LLLG",
        layer_types=_THREE_TO_ONE * 16,
    ),
}
