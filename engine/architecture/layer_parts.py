"""The stored tensors that layers of several architectures have in common."""

from tandem.engine.architecture.spec import Size, TensorSpec

HIDDEN: tuple[Size, ...] = ("hidden_size",)
QKV = (
    TensorSpec("self_attn.q_proj.weight", "qkv", ("q_size", "hidden_size")),
    TensorSpec("self_attn.k_proj.weight", "qkv", ("kv_size", "hidden_size")),
    TensorSpec("self_attn.v_proj.weight", "qkv", ("kv_size", "hidden_size")),
)
PACKED_QKV = (TensorSpec("self_attn.qkv_proj.weight", "qkv", ("qkv_size", "hidden_size")),)
OUTPUT = (TensorSpec("self_attn.o_proj.weight", "output", ("hidden_size", "q_size")),)
DOWN = (TensorSpec("mlp.down_proj.weight", "down", ("hidden_size", "intermediate_size")),)
MLP = (
    TensorSpec("mlp.gate_proj.weight", "gate_up", ("intermediate_size", "hidden_size")),
    TensorSpec("mlp.up_proj.weight", "gate_up", ("intermediate_size", "hidden_size")),
    *DOWN,
)
PACKED_MLP = (
    TensorSpec("mlp.gate_up_proj.weight", "gate_up", ("gate_up_size", "hidden_size")),
    *DOWN,
)
PRE_NORMS = (
    TensorSpec("input_layernorm.weight", "input_norm", HIDDEN),
    TensorSpec("post_attention_layernorm.weight", "post_norm", HIDDEN),
)
POST_NORMS = (
    TensorSpec("post_attention_layernorm.weight", "attention_out_norm", HIDDEN),
    TensorSpec("post_feedforward_layernorm.weight", "mlp_out_norm", HIDDEN),
)
GEMMA_NORMS = (
    TensorSpec("input_layernorm.weight", "input_norm", HIDDEN),
    TensorSpec("post_attention_layernorm.weight", "attention_out_norm", HIDDEN),
    TensorSpec("pre_feedforward_layernorm.weight", "post_norm", HIDDEN),
    TensorSpec("post_feedforward_layernorm.weight", "mlp_out_norm", HIDDEN),
)
GLM4_NORMS = (
    *PRE_NORMS,
    TensorSpec("post_self_attn_layernorm.weight", "attention_out_norm", HIDDEN),
    TensorSpec("post_mlp_layernorm.weight", "mlp_out_norm", HIDDEN),
)
QK_NORM = (
    TensorSpec("self_attn.q_norm.weight", "qk_norm", ("head_dim",), repeats="num_heads"),
    TensorSpec("self_attn.k_norm.weight", "qk_norm", ("head_dim",), repeats="num_kv_heads"),
)
WIDE_QK_NORM = (
    TensorSpec("self_attn.q_norm.weight", "wide_q_norm", ("q_size",)),
    TensorSpec("self_attn.k_norm.weight", "wide_k_norm", ("kv_size",)),
)
ATTENTION = PRE_NORMS + QKV + OUTPUT
DENSE = ATTENTION + MLP


def qkv_bias(flag: str = "attention_bias") -> tuple[TensorSpec, ...]:
    """Return the biases of queries, keys and values."""
    return (
        TensorSpec("self_attn.q_proj.bias", "qkv_bias", ("q_size",), flag=flag),
        TensorSpec("self_attn.k_proj.bias", "qkv_bias", ("kv_size",), flag=flag),
        TensorSpec("self_attn.v_proj.bias", "qkv_bias", ("kv_size",), flag=flag),
    )


def output_bias(flag: str = "attention_bias") -> tuple[TensorSpec, ...]:
    """Return the bias of attention's output."""
    return (TensorSpec("self_attn.o_proj.bias", "output_bias", HIDDEN, flag=flag),)


ATTENTION_BIAS = qkv_bias() + output_bias()
MLP_BIAS = (
    TensorSpec("mlp.gate_proj.bias", "gate_up_bias", ("intermediate_size",), flag="mlp_bias"),
    TensorSpec("mlp.up_proj.bias", "gate_up_bias", ("intermediate_size",), flag="mlp_bias"),
    TensorSpec("mlp.down_proj.bias", "down_bias", HIDDEN, flag="mlp_bias"),
)
