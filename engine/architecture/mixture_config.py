"""The mixtures of experts of a model, from its config.json."""

from dataclasses import dataclass

from tandem.engine.architecture.json_file import JsonObject
from tandem.engine.architecture.spec import Architecture, Mixture
from tandem.kernels.reference.routing import Routing

_NUM_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # of names for one thing


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The experts of every layer that has some."""

    num_experts: int
    width: int  # of each expert
    shared_width: int  # of the feed-forward layer beside them; 0: there is none
    routing: Routing
    sparse_layers: tuple[bool, ...]  # True where a layer has experts
    alpha: float = 1.0  # these two as in ExpertWeights
    limit: float = 0.0


def read_mixture(
    config: JsonObject, architecture: Architecture, num_layers: int
) -> MixtureConfig | None:
    """Return the experts, or None for a dense decoder."""
    mixture = architecture.mixture
    if mixture is None:
        return None
    if config.data.get("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "only silu is supported in experts")
    present = (key for key in _NUM_KEYS if config.data.get(key) is not None)
    num_key = next(present, _NUM_KEYS[0])
    num_experts = config.positive(num_key)
    width = config.positive(mixture.width_key)
    return MixtureConfig(
        num_experts,
        width,
        _shared_width(config, mixture, width),
        _routing(config, mixture, num_key, num_experts),
        _sparse_layers(config, architecture, num_layers),
        alpha=config.number("swiglu_alpha", 1.702) if mixture.is_clamped else 1.0,
        limit=config.number("swiglu_limit", 7.0) if mixture.is_clamped else 0.0,
    )


def _shared_width(config: JsonObject, mixture: Mixture, width: int) -> int:
    key = mixture.shared_width_key
    if not key:
        return 0
    return config.positive(key) * (width if key == "n_shared_experts" else 1)


def _routing(config: JsonObject, mixture: Mixture, num_key: str, num_experts: int) -> Routing:
    num_chosen = config.positive("num_experts_per_tok")
    is_renormalized = mixture.is_renormalized or config.flag("norm_topk_prob")
    if not mixture.is_sigmoid:
        _check_at_most(config, "num_experts_per_tok", num_chosen, num_experts)
        return Routing(num_chosen, is_renormalized=is_renormalized)
    num_groups, num_open = config.positive("n_group", 1), config.positive("topk_group", 1)
    if num_experts % num_groups:
        raise config.error("n_group", f"{num_groups} does not divide {num_key} {num_experts}")
    _check_at_most(config, "topk_group", num_open, num_groups)
    most = num_experts // num_groups * num_open
    _check_at_most(config, "num_experts_per_tok", num_chosen, most)
    scale = config.number("routed_scaling_factor", 1.0)
    return Routing(num_chosen, True, is_renormalized, scale, num_groups, num_open)


def _check_at_most(config: JsonObject, key: str, value: int, most: int) -> None:
    if value > most:
        raise config.error(key, f"{value} is above {most}, the number to choose from")


def _sparse_layers(
    config: JsonObject, architecture: Architecture, num_layers: int
) -> tuple[bool, ...]:
    if all(spec.layers != "dense" for spec in architecture.layer_tensors):
        return (True,) * num_layers
    step = config.positive("decoder_sparse_step", 1)
    key = "first_k_dense_replace"
    first = config.positive(key) if config.data.get(key) else 0
    dense = config.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers", "must be a list of layers")
    return tuple(
        layer >= first and (layer + 1) % step == 0 and layer not in dense
        for layer in range(num_layers)
    )
