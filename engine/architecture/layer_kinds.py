"""The kind of attention of each layer: how it rotates, and how far back it sees."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.architecture.json_file import JsonObject
from tandem.engine.architecture.rope_config import RopeConfig
from tandem.engine.architecture.spec import Architecture, Windows

_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's rotation, and the number of positions that a query sees, its own the last."""

    rope: RopeConfig | None  # None: queries and keys are not rotated
    window: int = 0  # tokens; 0: all


def read_layer_kinds(
    config: JsonObject,
    architecture: Architecture,
    num_layers: int,
    ropes: Sequence[RopeConfig],  # as of read_ropes
) -> tuple[LayerKind, ...]:
    """Return the kind of every layer."""
    window = _window(config, architecture)
    slides = _sliding_layers(config, architecture, num_layers)
    longest = config.positive("max_position_embeddings")
    kinds = []
    for layer in range(num_layers):
        rope = ropes[slides[layer]] if _rotates(config, architecture, layer, slides) else None
        if slides[layer] and not window:
            raise config.error("sliding_window", f"missing, and layer {layer} has a window")
        kinds.append(LayerKind(rope, window if slides[layer] and window < longest else 0))
    return tuple(kinds)


def _window(config: JsonObject, architecture: Architecture) -> int:
    """Return sliding_window, or 0 where it does not count."""
    if config.data.get("sliding_window") in (None, 0):  # transformers writes 0 for Qwen2-MoE
        return 0
    if architecture.windows is None:
        raise config.error("sliding_window", f"is set, which {architecture.name} does not have")
    return config.positive("sliding_window")


def _sliding_layers(config: JsonObject, architecture: Architecture, num_layers: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    windows = architecture.windows
    asked = windows is not None and (not windows.asked or config.flag("use_sliding_window"))
    listed = config.data.get("layer_types")
    if listed is not None:
        slides = _listed(config, listed, num_layers)
        if any(slides) and (windows is None or not windows.by_layer_types):
            raise config.error("layer_types", f"only full_attention in {architecture.name}")
        if windows is not None and windows.by_layer_types:
            return [each and asked for each in slides]
    if windows is None or not asked or config.data.get("sliding_window") is None:
        return [False] * num_layers
    if windows.of_no_rope:
        rotating = [False] * num_layers
        return [not _rotates(config, architecture, layer, rotating) for layer in range(num_layers)]
    return _by_rule(config, windows, num_layers)


def _listed(config: JsonObject, listed: object, num_layers: int) -> list[bool]:
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise config.error(
            "layer_types", f"must be a list of {num_layers} names, one of each layer"
        )
    for layer, name in enumerate(listed):
        if not isinstance(name, str) or name not in _TYPES:
            raise config.error(
                "layer_types",
                f"{name!r} of layer {layer} is not supported; {', '.join(_TYPES)} are",
            )
    return [_TYPES[name] for name in listed]


def _by_rule(config: JsonObject, windows: Windows, num_layers: int) -> list[bool]:
    first = config.data.get(windows.first_key) or 0
    if first:
        first = config.positive(windows.first_key)
    key, every = windows.full_every_key, windows.full_every
    pattern = config.data.get(key)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise config.error(key, f"{pattern!r} is not made of letters L and G")
        return [pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
    if pattern is not None:
        every = config.positive(key)
    end = config.positive(windows.end_key) if windows.end_key else num_layers
    if every:
        return [(layer + 1) % every != 0 and layer < end for layer in range(num_layers)]
    return [layer >= first for layer in range(num_layers)]


def _rotates(
    config: JsonObject, architecture: Architecture, layer: int, slides: Sequence[bool]
) -> bool:
    if architecture.no_rope == "full_attention":
        return slides[layer] or config.data.get("sliding_window") is None
    if architecture.no_rope != "no_rope_layers":
        return True
    listed = config.data.get("no_rope_layers")
    if listed is None:
        return (layer + 1) % config.positive("no_rope_layer_interval", 4) != 0
    if not isinstance(listed, list) or len(listed) != len(slides):
        raise config.error("no_rope_layers", f"must be a list of {len(slides)} numbers")
    if listed[layer] not in (0, 1):
        raise config.error("no_rope_layers", f"of layer {layer} must be 0 or 1")
    return bool(listed[layer])
