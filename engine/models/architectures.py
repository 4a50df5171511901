"""The architectures that the engine runs, as data: their stored tensors, and where these go.

To add one, list the tensors of its layers and enter it in ARCHITECTURES. Weights, random weights
and the figures of benchmarks follow these lists.
"""

from dataclasses import dataclass
from typing import Literal

# Attributes of a model's shape, which dimensions of tensors are named after.
Size = Literal[
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "q_size",
    "kv_size",
    "head_dim",
    "num_heads",
    "num_kv_heads",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor and the slot of LayerWeights or ModelWeights that it fills.

    Tensors of one slot stand one below the other, in the order of their list.
    """

    name: str  # in the files; a layer's follows "model.layers.N."
    slot: str
    shape: tuple[Size, ...]
    repeats: Size | None = None  # rows of the slot that are copies of it; None: it is no row

    @property
    def kind(self) -> Literal["matrix", "norm", "bias"]:
        if len(self.shape) == 2:
            return "matrix"
        return "bias" if self.name.endswith(".bias") else "norm"

    def stored_shape(self, sizes: object) -> tuple[int, ...]:
        """Return the shape in the files of a model of these sizes."""
        return tuple(getattr(sizes, name) for name in self.shape)

    def slot_shape(self, sizes: object) -> tuple[int, ...]:
        """Return the shape of the rows that it fills in its slot."""
        stored = self.stored_shape(sizes)
        return stored if self.repeats is None else (getattr(sizes, self.repeats), *stored)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder: RMSNorm, rotary grouped-query attention and SwiGLU, with its variations."""

    name: str  # in config.json's `architectures`
    model_type: str  # in config.json
    layer_tensors: tuple[TensorSpec, ...]
    slides_by_default: bool = True  # a sliding_window counts without use_sliding_window


_DENSE = (
    TensorSpec("input_layernorm.weight", "input_norm", ("hidden_size",)),
    TensorSpec("self_attn.q_proj.weight", "qkv", ("q_size", "hidden_size")),
    TensorSpec("self_attn.k_proj.weight", "qkv", ("kv_size", "hidden_size")),
    TensorSpec("self_attn.v_proj.weight", "qkv", ("kv_size", "hidden_size")),
    TensorSpec("self_attn.o_proj.weight", "output", ("hidden_size", "q_size")),
    TensorSpec("post_attention_layernorm.weight", "post_norm", ("hidden_size",)),
    TensorSpec("mlp.gate_proj.weight", "gate_up", ("intermediate_size", "hidden_size")),
    TensorSpec("mlp.up_proj.weight", "gate_up", ("intermediate_size", "hidden_size")),
    TensorSpec("mlp.down_proj.weight", "down", ("hidden_size", "intermediate_size")),
)
_QK_NORM = (
    TensorSpec("self_attn.q_norm.weight", "qk_norm", ("head_dim",), repeats="num_heads"),
    TensorSpec("self_attn.k_norm.weight", "qk_norm", ("head_dim",), repeats="num_kv_heads"),
)
_QKV_BIAS = (
    TensorSpec("self_attn.q_proj.bias", "qkv_bias", ("q_size",)),
    TensorSpec("self_attn.k_proj.bias", "qkv_bias", ("kv_size",)),
    TensorSpec("self_attn.v_proj.bias", "qkv_bias", ("kv_size",)),
)

LLAMA = Architecture("LlamaForCausalLM", "llama", _DENSE)
QWEN2 = Architecture("Qwen2ForCausalLM", "qwen2", _DENSE + _QKV_BIAS, slides_by_default=False)
QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", _DENSE + _QK_NORM)

ARCHITECTURES = {each.name: each for each in (LLAMA, QWEN2, QWEN3)}

_MODEL = (
    TensorSpec("model.embed_tokens.weight", "embedding", ("vocab_size", "hidden_size")),
    TensorSpec("model.norm.weight", "final_norm", ("hidden_size",)),
)
_LM_HEAD = TensorSpec("lm_head.weight", "lm_head", ("vocab_size", "hidden_size"))


def model_tensors(tie_word_embeddings: bool) -> tuple[TensorSpec, ...]:
    """Return the tensors that stand outside of the layers."""
    return _MODEL if tie_word_embeddings else (*_MODEL, _LM_HEAD)
