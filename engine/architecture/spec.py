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
    "num_experts",
    "expert_size",
    "expert_gate_up_size",
    "shared_size",
    "shared_gate_size",
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
    layers: Literal["all", "dense", "sparse"] = "all"  # those that have it, by their experts
    is_transposed: bool = False  # its last two dimensions are swapped in the slot
    is_interleaved: bool = False  # its outputs are a gate, the up beside it, and so on
    is_float32: bool = False  # in every model

    @property
    def kind(self) -> Literal["matrix", "norm", "bias"]:
        if self.name.endswith("norm.weight"):
            return "norm"
        return "bias" if len(self.shape) == 1 or self.name.endswith("bias") else "matrix"

    @property
    def is_per_expert(self) -> bool:
        """True where each expert has a tensor, with its number in place of {}."""
        return "{}" in self.name

    @property
    def row_axis(self) -> int:
        """The dimension of the slot in which tensors follow one another."""
        return 1 if self.is_per_expert else 0

    def stored_shape(self, sizes: object) -> tuple[int, ...]:
        """Return the shape in the files of a model of these sizes."""
        return tuple(getattr(sizes, name) for name in self.shape)

    def slot_shape(self, sizes: object) -> tuple[int, ...]:
        """Return the shape of the rows that it fills in its slot, those of all experts."""
        stored = self.stored_shape(sizes)
        if self.is_transposed:
            stored = (*stored[:-2], stored[-1], stored[-2])
        repeats: Size | None = "num_experts" if self.is_per_expert else self.repeats
        return stored if repeats is None else (getattr(sizes, repeats), *stored)


@dataclass(frozen=True, slots=True)
class Windows:
    """The layers that see a sliding window, where config.json has no `layer_types`."""

    full_every: int = 0  # each n-th layer sees its whole context; 0: none does
    full_every_key: str = ""  # of config.json, replaces full_every: a number, or letters L and G
    first_key: str = ""  # of config.json: the first layer with a window; "": the first of all
    end_key: str = ""  # of config.json: the first layer of those at the end that have none
    asked: bool = False  # there is none unless use_sliding_window is true
    of_no_rope: bool = False  # the layers that do not rotate have one, and no other
    by_layer_types: bool = True  # config.json's layer_types replace all this


@dataclass(frozen=True, slots=True)
class Mixture:
    """The mixtures of experts in place of feed-forward layers."""

    width_key: str = "moe_intermediate_size"  # of config.json
    shared_width_key: str = ""  # of the feed-forward layer beside the experts; "": there is none
    is_sigmoid: bool = False  # of the router, with groups and a correction of the choice
    is_renormalized: bool = True  # weights of chosen experts; False: where norm_topk_prob says so
    is_clamped: bool = False  # gates and ups, by swiglu_limit


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder with rotary grouped-query attention, RMSNorm and a gated feed-forward layer.

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
    mixture: Mixture | None = None  # None: every layer is dense
    # Those of a layer in files that stack experts, where published ones do not, or by other names.
    stacked_tensors: tuple[TensorSpec, ...] = ()
    code: str = ""  # foreign code that computes it, with its version; "": the engine's own
    models: str = ""  # published ones, for docs/models.md

    @property
    def flags(self) -> tuple[str, ...]:
        """Keys of config.json that tell which tensors exist."""
        return tuple(dict.fromkeys(spec.flag for spec in self.layer_tensors if spec.flag))

    def tensors(
        self,
        flags: Collection[str],
        layer: Literal["dense", "sparse"] = "dense",
        *,
        is_stacked: bool = False,
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors of a `layer` where those `flags` are true."""
        return tuple(
            spec
            for spec in (self.stacked_tensors if is_stacked else self.layer_tensors)
            if (not spec.flag or spec.flag in flags) and spec.layers in ("all", layer)
        )


_MODEL = (
    TensorSpec("model.embed_tokens.weight", "embedding", ("vocab_size", "hidden_size")),
    TensorSpec("model.norm.weight", "final_norm", ("hidden_size",)),
)
_LM_HEAD = TensorSpec("lm_head.weight", "lm_head", ("vocab_size", "hidden_size"))


def model_tensors(tie_word_embeddings: bool) -> tuple[TensorSpec, ...]:
    """Return the tensors that stand outside of the layers."""
    return _MODEL if tie_word_embeddings else (*_MODEL, _LM_HEAD)
