"""The form of an architecture's table: its stored tensors and how it varies from a plain decoder.

A plain decoder norms before attention and before its feed-forward layer, rotates all of a head by
one base in every layer, lets every query see its whole context, and scales nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

# Attributes of a model's shape, which dimensions of tensors are named after.
Size = Literal[
    "hidden_size",
    "intermediate_size",
    "gate_up_size",
    "vocab_size",
    "q_size",
    "kv_size",
    "qkv_size",
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
    flag: str = ""  # the key of config.json that must be true for it to exist; "": it always does

    @property
    def kind(self) -> Literal["matrix", "norm", "bias"]:
        if len(self.shape) == 2:
            return "matrix"
        return "norm" if self.name.endswith("norm.weight") else "bias"

    def stored_shape(self, sizes: object) -> tuple[int, ...]:
        """Return the shape in the files of a model of these sizes."""
        return tuple(getattr(sizes, name) for name in self.shape)

    def slot_shape(self, sizes: object) -> tuple[int, ...]:
        """Return the shape of the rows that it fills in its slot."""
        stored = self.stored_shape(sizes)
        return stored if self.repeats is None else (getattr(sizes, self.repeats), *stored)


@dataclass(frozen=True, slots=True)
class Windows:
    """The layers that see a sliding window, where config.json has no `layer_types`."""

    full_every: int = 0  # each n-th layer sees its whole context; 0: none does
    full_every_key: str = ""  # of config.json, replaces full_every: a number, or letters L and G
    first_key: str = ""  # of config.json: the first layer with a window; "": the first of all
    asked: bool = False  # there is none unless use_sliding_window is true
    of_no_rope: bool = False  # the layers that do not rotate have one, and no other
    by_layer_types: bool = True  # config.json's layer_types replace all this


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder with rotary grouped-query attention, RMSNorm and a gated feed-forward layer.

    Its norms stand where `layer_tensors` has their slots; see LayerWeights.
    """

    name: str  # in config.json's `architectures`
    model_type: str  # in config.json
    layer_tensors: tuple[TensorSpec, ...]
    # Keys of config.json that it reads beside those of every decoder: scales, caps, multipliers.
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)  # of absent keys
    windows: Windows | None = None  # None: it has no layers with a window
    # The key of the rotary base of layers with a window, whose rope is not scaled; "": as others.
    local_rope: str = ""
    no_rope: Literal["", "no_rope_layers", "full_attention"] = ""  # the layers that do not rotate
    rope_interleaved: bool = False  # neighbors in a head turn together, not halves
    norm_offset: float = 0.0  # added to the stored weights of norms
    scales_embedding: bool = False  # by the square root of hidden_size
    code: str = ""  # foreign code that computes it, with its version; "": the engine's own
    models: str = ""  # published ones, for docs/models.md

    @property
    def flags(self) -> tuple[str, ...]:
        """Keys of config.json that tell which tensors exist."""
        return tuple(dict.fromkeys(spec.flag for spec in self.layer_tensors if spec.flag))

    def tensors(self, flags: Collection[str]) -> tuple[TensorSpec, ...]:
        """Return the tensors of a layer where those `flags` are true."""
        return tuple(spec for spec in self.layer_tensors if not spec.flag or spec.flag in flags)


_MODEL = (
    TensorSpec("model.embed_tokens.weight", "embedding", ("vocab_size", "hidden_size")),
    TensorSpec("model.norm.weight", "final_norm", ("hidden_size",)),
)
_LM_HEAD = TensorSpec("lm_head.weight", "lm_head", ("vocab_size", "hidden_size"))


def model_tensors(tie_word_embeddings: bool) -> tuple[TensorSpec, ...]:
    """Return the tensors that stand outside of the layers."""
    return _MODEL if tie_word_embeddings else (*_MODEL, _LM_HEAD)
