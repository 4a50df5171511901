"""A model's configuration, from the config.json of its folder."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TypeVar

from tandem.engine.architecture.architectures import ARCHITECTURES, WITH_TEXT_CONFIG
from tandem.engine.architecture.ends import eos_token_ids
from tandem.engine.architecture.json_file import JsonObject, read_json
from tandem.engine.architecture.layer_groups import LayerGroups, group_layers
from tandem.engine.architecture.layer_kinds import LayerKind, read_layer_kinds
from tandem.engine.architecture.mixture_config import MixtureConfig, read_mixture
from tandem.engine.architecture.quantization import Quantization, read_quantization
from tandem.engine.architecture.rope_config import RopeConfig, read_ropes, with_positions
from tandem.engine.architecture.spec import Architecture, TensorSpec
from tandem.runtime.wire.dtypes import ELEMENT_BYTES

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's architecture and sizes."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    rope: RopeConfig  # of layers that see their whole context
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the stored weights: bfloat16 | float16 | float32
    flags: tuple[str, ...] = ()  # those of architecture.flags that are true
    layer_kinds: tuple[LayerKind, ...] = ()  # of each layer; none: LayerKind(rope) in all
    activation: Activation = "silu"
    query_scale: float = 0.0  # of attention scores; 0: head_dim ** -0.5
    attention_cap: float = 0.0  # soft cap of attention scores; 0: none
    logit_cap: float = 0.0  # soft cap of logits; 0: none
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a layer adds to the residual stream
    logit_multiplier: float = 1.0
    mixture: MixtureConfig | None = None  # None: every layer is dense
    quantization: Quantization | None = None  # None: every matrix is stored as numbers
    text_config: bool = False  # the text part of a model of several media
    sums_of_width: int = 0  # the ranks whose order of sums it has; 0: the order of every number

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def gate_up_size(self) -> int:
        return 2 * self.intermediate_size

    @property
    def num_experts(self) -> int:
        return self.mixture.num_experts if self.mixture else 0

    @property
    def expert_size(self) -> int:
        return self.mixture.width if self.mixture else 0

    @property
    def expert_gate_up_size(self) -> int:
        return 2 * self.expert_size

    @property
    def shared_size(self) -> int:
        return self.mixture.shared_width if self.mixture else 0

    @property
    def shared_gate_size(self) -> int:
        return 1

    def has_experts(self, layer: int) -> bool:
        """Return True for a layer, counted from 0, with experts."""
        return self.mixture is not None and self.mixture.sparse_layers[layer]

    def layer_tensors(self, layer: int, *, is_stacked: bool = False) -> tuple[TensorSpec, ...]:
        """Return the stored tensors of a layer, counted from 0."""
        kind: Literal["dense", "sparse"] = "sparse" if self.has_experts(layer) else "dense"
        return self.architecture.tensors(self.flags, kind, is_stacked=is_stacked)

    @property
    def kv_form(self) -> str:
        """All that keys and values depend on besides weights and tokens.

        Its digest is over this whole reading of config.json, architecture and rope included.
        """
        architecture = replace(self.architecture, models="")
        read = replace(self, architecture=architecture, eos_token_ids=())
        digest = blake2b(repr(read).encode(), digest_size=6)
        ropes = [self.rope, *(kind.rope for kind in self.layer_kinds)]
        is_long = any(rope is not None and rope.long_factors for rope in ropes)
        length = "long" if is_long else "short"
        rope = f", longrope for {length} sequences" if self.rope.kind == "longrope" else ""
        return f"{self.architecture.name}{rope}, {digest.hexdigest()}"

    def for_length(self, longest: int) -> "ModelConfig":
        """Return the configuration for sequences of up to `longest` tokens.

        Heads turn by the short factors of longrope where none is above the original context.
        """
        kinds = tuple(
            replace(kind, rope=_for_length(kind.rope, longest)) for kind in self.layer_kinds
        )
        return replace(self, rope=_for_length(self.rope, longest), layer_kinds=kinds)

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of attention of a layer, counted from 0."""
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind(self.rope)

    @property
    def layer_groups(self) -> LayerGroups:
        """The groups of layers whose K/V shares blocks."""
        windows = tuple(self.layer_kind(layer).window for layer in range(self.num_layers))
        return group_layers(windows, self.max_position_embeddings)


Rope = TypeVar("Rope", RopeConfig, RopeConfig | None)


def _for_length(rope: Rope, longest: int) -> Rope:
    if rope is None or longest > rope.original_max_position_embeddings:
        return rope
    return replace(rope, long_factors=())


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the configuration of the model in folder `path`.

    Raises ModelError naming the file and the key at fault.
    """
    folder = Path(path)
    whole = read_json(folder / "config.json")
    architecture, config = _architecture(whole)
    _refuse_unsupported(config, architecture)
    hidden_size = config.positive("hidden_size")
    num_heads = config.positive("num_attention_heads")
    num_kv_heads = config.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads"
        )
    head_dim = _head_dim(config, hidden_size, num_heads)
    num_layers = config.positive("num_hidden_layers")
    ropes = read_ropes(config, architecture, head_dim)
    config = with_positions(config, ropes[0])
    plain = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.positive("vocab_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=ropes[0],
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids([whole, config], folder),
        dtype=_dtype(whole, config),
        flags=tuple(flag for flag in architecture.flags if config.flag(flag)),
        layer_kinds=read_layer_kinds(config, architecture, num_layers, ropes),
        activation=config.choice(_activation_key(config), ACTIVATIONS, "silu"),
        mixture=read_mixture(config, architecture, num_layers),
        quantization=read_quantization(whole, config),
        text_config=config.prefix != whole.prefix,
    )
    return _with_scales(plain, config)


def _architecture(whole: JsonObject) -> tuple[Architecture, JsonObject]:
    """Return the architecture, and the object with its sizes: the file's or its text_config.

    Keys that the object leaves out are those of the architecture's defaults.
    """
    names = whole.data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in ARCHITECTURES:
        architecture = ARCHITECTURES[name]
        return architecture, whole.with_defaults(architecture.defaults)
    if isinstance(name, str) and name in WITH_TEXT_CONFIG:
        config = whole.part("text_config")
        kinds = {each.model_type: each for each in ARCHITECTURES.values()}
        architecture = config.choice("model_type", kinds, "")
        key = "tie_word_embeddings"  # counts beside text_config
        beside = {key: whole.data[key]} if key in whole.data else {}
        text = replace(config, data=config.data | beside)
        return architecture, text.with_defaults(architecture.defaults)
    supported = ", ".join((*ARCHITECTURES, *WITH_TEXT_CONFIG))
    raise whole.error("architectures", f"{name!r} is not supported; supported: {supported}")


def _refuse_unsupported(config: JsonObject, architecture: Architecture) -> None:
    for key in {"attention_bias", "mlp_bias"}.difference(architecture.flags):
        if config.data.get(key):
            raise config.error(key, "is set, which is not supported")
    for key in ("use_bidirectional_attention", "clip_qkv"):
        if config.data.get(key):
            raise config.error(key, "is set, which is not supported")


def _activation_key(config: JsonObject) -> str:
    return "hidden_activation" if config.data.get("hidden_activation") else "hidden_act"


def _with_scales(plain: ModelConfig, config: JsonObject) -> ModelConfig:
    """Read the scales and caps that `plain.architecture` reads."""

    def read(key: str, default: float) -> float:
        is_read = key in plain.architecture.reads and config.data.get(key) is not None
        return config.number(key) if is_read else default

    embedding_multiplier = read("embedding_multiplier", 1.0)
    if plain.architecture.scales_embedding:
        embedding_multiplier = plain.hidden_size**0.5
    scalar = read("query_pre_attn_scalar", plain.head_dim)
    return replace(
        plain,
        query_scale=read("attention_multiplier", scalar**-0.5),
        attention_cap=read("attn_logit_softcapping", 0.0),
        logit_cap=read("final_logit_softcapping", 0.0),
        embedding_multiplier=embedding_multiplier,
        residual_multiplier=read("residual_multiplier", 1.0),
        logit_multiplier=1.0 / read("logits_scaling", 1.0),
    )


def _head_dim(config: JsonObject, hidden_size: int, num_heads: int) -> int:
    if config.data.get("head_dim") is None and hidden_size % num_heads:
        raise config.error(
            "hidden_size", f"{hidden_size} is not a multiple of {num_heads} attention heads"
        )
    head_dim = config.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd, which rotary embeddings cannot be")
    return head_dim


def _dtype(whole: JsonObject, config: JsonObject) -> str:
    for part in (config, whole):
        for key in ("dtype", "torch_dtype"):
            if part.data.get(key):
                name = str(part.data[key]).removeprefix("torch.")
                if name not in ELEMENT_BYTES:
                    raise part.error(
                        key, f"{name!r} is not supported; supported: {', '.join(ELEMENT_BYTES)}"
                    )
                return name
    return "float32"
