"""The architectures with mixtures of experts; beside those of architectures.py."""

from dataclasses import replace
from typing import Literal

from tandem.engine.architecture.layer_parts import (
    ATTENTION,
    ATTENTION_BIAS,
    MLP,
    QK_NORM,
    WIDE_QK_NORM,
    qkv_bias,
)
from tandem.engine.architecture.spec import Architecture, Mixture, Size, TensorSpec, Windows

Specs = tuple[TensorSpec, ...]


def _in_layers(layers: Literal["dense", "sparse"], specs: Specs) -> Specs:
    return tuple(replace(spec, layers=layers) for spec in specs)


def _router(name: str) -> Specs:
    return _in_layers("sparse", (TensorSpec(name, "router", ("num_experts", "hidden_size")),))


def _experts(prefix: str, gate: str, up: str, down: str) -> Specs:
    """Return the tensors of experts that are stored one by one."""
    return _in_layers(
        "sparse",
        (
            TensorSpec(f"{prefix}{gate}.weight", "experts_gate_up", ("expert_size", "hidden_size")),
            TensorSpec(f"{prefix}{up}.weight", "experts_gate_up", ("expert_size", "hidden_size")),
            TensorSpec(f"{prefix}{down}.weight", "experts_down", ("hidden_size", "expert_size")),
        ),
    )


def _stacked(prefix: str, gate_up: str = "gate_up_proj", down: str = "down_proj") -> Specs:
    """Return the tensors of experts that are stored as one."""
    inward: tuple[Size, ...] = ("num_experts", "expert_gate_up_size", "hidden_size")
    outward: tuple[Size, ...] = ("num_experts", "hidden_size", "expert_size")
    return _in_layers(
        "sparse",
        (
            TensorSpec(prefix + gate_up, "experts_gate_up", inward),
            TensorSpec(prefix + down, "experts_down", outward),
        ),
    )


def _shared_expert(prefix: str) -> Specs:
    return _in_layers(
        "sparse",
        (
            TensorSpec(f"{prefix}gate_proj.weight", "gate_up", ("shared_size", "hidden_size")),
            TensorSpec(f"{prefix}up_proj.weight", "gate_up", ("shared_size", "hidden_size")),
            TensorSpec(f"{prefix}down_proj.weight", "down", ("hidden_size", "shared_size")),
        ),
    )


MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    ATTENTION
    + _experts("block_sparse_moe.experts.{}.", "w1", "w3", "w2")
    + _router("block_sparse_moe.gate.weight"),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    windows=Windows(by_layer_types=False),
    mixture=Mixture(width_key="intermediate_size"),
    stacked_tensors=ATTENTION + _stacked("mlp.experts.") + _router("mlp.gate.weight"),
    models="Mixtral",
)
_QWEN_ROUTER = _router("mlp.gate.weight")
_QWEN_EXPERTS = _experts("mlp.experts.{}.", "gate_proj", "up_proj", "down_proj")
_DENSE_MLP = _in_layers("dense", MLP)
_QWEN3_ATTENTION = ATTENTION + QK_NORM + ATTENTION_BIAS
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _QWEN3_ATTENTION + _DENSE_MLP + _QWEN_ROUTER + _QWEN_EXPERTS,
    defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    windows=Windows(asked=True, by_layer_types=False),
    mixture=Mixture(is_renormalized=False),
    stacked_tensors=_QWEN3_ATTENTION + _DENSE_MLP + _QWEN_ROUTER + _stacked("mlp.experts."),
    models="Qwen3 30B-A3B, 235B-A22B and Coder",
)
_QWEN2_MOE = (
    ATTENTION
    + qkv_bias("qkv_bias")
    + _DENSE_MLP
    + _shared_expert("mlp.shared_expert.")
    + _QWEN_ROUTER
    + _in_layers(
        "sparse",
        (
            TensorSpec(
                "mlp.shared_expert_gate.weight", "shared_gate", ("shared_gate_size", "hidden_size")
            ),
        ),
    )
)
QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _QWEN2_MOE + _QWEN_EXPERTS,
    defaults={"qkv_bias": True, "max_window_layers": 28, "sliding_window": 4096},
    windows=Windows(asked=True, full_every=2, end_key="max_window_layers"),
    mixture=Mixture(shared_width_key="shared_expert_intermediate_size", is_renormalized=False),
    stacked_tensors=_QWEN2_MOE + _stacked("mlp.experts."),
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
)
_OLMOE = ATTENTION + WIDE_QK_NORM + ATTENTION_BIAS + _QWEN_ROUTER
OLMOE = Architecture(
    "OlmoeForCausalLM",
    "olmoe",
    _OLMOE + _QWEN_EXPERTS,
    defaults={"rms_norm_eps": 1e-5},
    mixture=Mixture(width_key="intermediate_size", is_renormalized=False),
    stacked_tensors=_OLMOE + _stacked("mlp.experts."),
    models="OLMoE",
)
GRANITE_MOE = Architecture(
    "GraniteMoeForCausalLM",
    "granitemoe",
    ATTENTION
    + ATTENTION_BIAS
    + _router("block_sparse_moe.router.layer.weight")
    + _stacked("block_sparse_moe.", "input_linear.weight", "output_linear.weight"),
    reads=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    defaults={"attention_multiplier": 1.0},
    mixture=Mixture(width_key="intermediate_size"),
    stacked_tensors=ATTENTION
    + ATTENTION_BIAS
    + _router("block_sparse_moe.router.weight")
    + _stacked("block_sparse_moe.experts."),
    models="Granite 3 1B-A400M and 3B-A800M",
)
_GPT_OSS_EXPERTS = (
    TensorSpec("mlp.router.bias", "router_bias", ("num_experts",)),
    TensorSpec(
        "mlp.experts.gate_up_proj",
        "experts_gate_up",
        ("num_experts", "hidden_size", "expert_gate_up_size"),
        is_transposed=True,
        is_interleaved=True,
    ),
    TensorSpec(
        "mlp.experts.gate_up_proj_bias",
        "experts_gate_up_bias",
        ("num_experts", "expert_gate_up_size"),
        is_interleaved=True,
    ),
    TensorSpec(
        "mlp.experts.down_proj",
        "experts_down",
        ("num_experts", "expert_size", "hidden_size"),
        is_transposed=True,
    ),
    TensorSpec("mlp.experts.down_proj_bias", "experts_down_bias", ("num_experts", "hidden_size")),
)
GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    ATTENTION
    + ATTENTION_BIAS
    + (TensorSpec("self_attn.sinks", "sinks", ("num_heads",)),)
    + _router("mlp.router.weight")
    + _GPT_OSS_EXPERTS,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
    windows=Windows(full_every=2),
    mixture=Mixture(width_key="intermediate_size", is_clamped=True),
    models="gpt-oss",
)
_GLM4_MOE = (
    ATTENTION
    + qkv_bias()
    + tuple(replace(spec, flag="use_qk_norm") for spec in QK_NORM)
    + _DENSE_MLP
    + _shared_expert("mlp.shared_experts.")
    + _router("mlp.gate.weight")
    + _in_layers(
        "sparse",
        (
            TensorSpec(
                "mlp.gate.e_score_correction_bias",
                "router_correction",
                ("num_experts",),
                is_float32=True,
            ),
        ),
    )
)
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _GLM4_MOE + _QWEN_EXPERTS,
    defaults={
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    mixture=Mixture(shared_width_key="n_shared_experts", is_sigmoid=True, is_renormalized=False),
    stacked_tensors=_GLM4_MOE + _stacked("mlp.experts."),
    models="GLM-4.5, GLM-4.6",
)

MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GPT_OSS, GLM4_MOE)
