"""The architectures that the engine runs, as data, read by config.py, weights.py and decoder.py.

To add one, list the tensors of its layers and how it varies, and enter it in ARCHITECTURES.
Weights, random weights, the figures of benchmarks and docs/models.md follow these tables.
"""

from tandem.engine.models.spec import Architecture, Size, TensorSpec, Windows

_HIDDEN: tuple[Size, ...] = ("hidden_size",)
_QKV = (
    TensorSpec("self_attn.q_proj.weight", "qkv", ("q_size", "hidden_size")),
    TensorSpec("self_attn.k_proj.weight", "qkv", ("kv_size", "hidden_size")),
    TensorSpec("self_attn.v_proj.weight", "qkv", ("kv_size", "hidden_size")),
)
_PACKED_QKV = (TensorSpec("self_attn.qkv_proj.weight", "qkv", ("qkv_size", "hidden_size")),)
_OUTPUT = (TensorSpec("self_attn.o_proj.weight", "output", ("hidden_size", "q_size")),)
_DOWN = (TensorSpec("mlp.down_proj.weight", "down", ("hidden_size", "intermediate_size")),)
_MLP = (
    TensorSpec("mlp.gate_proj.weight", "gate_up", ("intermediate_size", "hidden_size")),
    TensorSpec("mlp.up_proj.weight", "gate_up", ("intermediate_size", "hidden_size")),
    *_DOWN,
)
_PACKED_MLP = (
    TensorSpec("mlp.gate_up_proj.weight", "gate_up", ("gate_up_size", "hidden_size")),
    *_DOWN,
)
_PRE_NORMS = (
    TensorSpec("input_layernorm.weight", "input_norm", _HIDDEN),
    TensorSpec("post_attention_layernorm.weight", "post_norm", _HIDDEN),
)
_POST_NORMS = (
    TensorSpec("post_attention_layernorm.weight", "attention_out_norm", _HIDDEN),
    TensorSpec("post_feedforward_layernorm.weight", "mlp_out_norm", _HIDDEN),
)
_QK_NORM = (
    TensorSpec("self_attn.q_norm.weight", "qk_norm", ("head_dim",), repeats="num_heads"),
    TensorSpec("self_attn.k_norm.weight", "qk_norm", ("head_dim",), repeats="num_kv_heads"),
)
_WIDE_QK_NORM = (
    TensorSpec("self_attn.q_norm.weight", "wide_q_norm", ("q_size",)),
    TensorSpec("self_attn.k_norm.weight", "wide_k_norm", ("kv_size",)),
)
_DENSE = _PRE_NORMS + _QKV + _OUTPUT + _MLP


def _qkv_bias(flag: str = "attention_bias") -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("self_attn.q_proj.bias", "qkv_bias", ("q_size",), flag=flag),
        TensorSpec("self_attn.k_proj.bias", "qkv_bias", ("kv_size",), flag=flag),
        TensorSpec("self_attn.v_proj.bias", "qkv_bias", ("kv_size",), flag=flag),
    )


def _output_bias(flag: str = "attention_bias") -> tuple[TensorSpec, ...]:
    return (TensorSpec("self_attn.o_proj.bias", "output_bias", _HIDDEN, flag=flag),)


_ATTENTION_BIAS = _qkv_bias() + _output_bias()
_MLP_BIAS = (
    TensorSpec("mlp.gate_proj.bias", "gate_up_bias", ("intermediate_size",), flag="mlp_bias"),
    TensorSpec("mlp.up_proj.bias", "gate_up_bias", ("intermediate_size",), flag="mlp_bias"),
    TensorSpec("mlp.down_proj.bias", "down_bias", _HIDDEN, flag="mlp_bias"),
)

LLAMA = Architecture("LlamaForCausalLM", "llama", _DENSE + _ATTENTION_BIAS + _MLP_BIAS)
_QWEN_WINDOWS = Windows(first_key="max_window_layers", asked=True)
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    _DENSE + _qkv_bias(flag=""),
    defaults={"max_window_layers": 28},
    windows=_QWEN_WINDOWS,
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    _DENSE + _QK_NORM + _ATTENTION_BIAS,
    defaults={"max_window_layers": 28},
    windows=_QWEN_WINDOWS,
)
MISTRAL = Architecture(
    "MistralForCausalLM", "mistral", _DENSE, windows=Windows(by_layer_types=False)
)
PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    _PRE_NORMS + _PACKED_QKV + _OUTPUT + _PACKED_MLP,
    windows=Windows(by_layer_types=False),
)

ARCHITECTURES = {each.name: each for each in (LLAMA, QWEN2, QWEN3, MISTRAL, PHI3)}

# Models of several media whose text part, at text_config, is one of these architectures.
WITH_TEXT_CONFIG: tuple[str, ...] = ()
