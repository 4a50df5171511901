"""A model's configuration, from the config.json of its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.engine.models.architectures import ARCHITECTURES, Architecture
from tandem.runtime.errors import ModelError

# Far above any model, and low enough that no size of tensors or tables overflows.
MOST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
}
MOST_REAL = 1e12  # of the base of rotary angles and the like
DTYPES = ("bfloat16", "float16", "float32")
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; the last three fields are read for kind "llama3" only."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # tokens


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
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the stored weights: bfloat16 | float16 | float32

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the configuration of the model in folder `path`.

    Raises ModelError naming the file and the key at fault.
    """
    folder = Path(path)
    config = _JsonFile(folder / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    hidden_size = config.positive("hidden_size")
    num_heads = config.positive("num_attention_heads")
    num_kv_heads = config.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads"
        )
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=config.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        vocab_size=config.positive("vocab_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_word_embeddings=bool(config.data.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(config, folder),
        dtype=_dtype(config),
    )


class _JsonFile:
    """A file with a JSON object; its errors name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ModelError(f"{path}: {exc.strerror or exc}") from exc
        except ValueError as exc:
            raise ModelError(f"{path}: not valid JSON: {exc}") from exc
        if not isinstance(data, dict):
            raise ModelError(f"{path}: not a JSON object")
        self.data: dict[str, Any] = data

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {key}: {problem}", param=key)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"must be a positive integer, not {value!r}")
        if value > MOST[key]:
            raise self.error(key, f"{value} is above {MOST[key]}, the most that is supported")
        return value

    def number(self, key: str, default: float) -> float:
        return self.positive_number(self.data, key, default)

    def positive_number(self, part: dict[str, Any], key: str, default: float | None) -> float:
        value = part.get(key, default)
        if value is None:
            raise self.error(key, "missing")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < MOST_REAL
        ):
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)


def _architecture(config: _JsonFile) -> Architecture:
    names = config.data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise config.error(
            "architectures", f"{name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _refuse_unsupported(config: _JsonFile, architecture: Architecture) -> None:
    data = config.data
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if data.get(key):
            raise config.error(key, "is set, which is not supported")
    if data.get("hidden_act", "silu") != "silu":
        raise config.error(
            "hidden_act", f"{data['hidden_act']!r} is not supported; supported: silu"
        )
    slides = data.get("use_sliding_window", architecture.slides_by_default)
    if slides and data.get("sliding_window") is not None:
        raise config.error("sliding_window", "is set, which is not supported")
    if set(data.get("layer_types") or ()) - {"full_attention"}:
        raise config.error("layer_types", "only full_attention is supported")


def _head_dim(config: _JsonFile, hidden_size: int, num_heads: int) -> int:
    if config.data.get("head_dim") is None and hidden_size % num_heads:
        raise config.error(
            "hidden_size", f"{hidden_size} is not a multiple of {num_heads} attention heads"
        )
    head_dim = config.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd, which rotary embeddings cannot be")
    return head_dim


def _rope(config: _JsonFile) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    key = "rope_parameters" if config.data.get("rope_parameters") else "rope_scaling"
    part = config.data.get(key) or {}
    if not isinstance(part, dict):
        raise config.error(key, "is not a JSON object")
    kind = part.get("rope_type", part.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise config.error(
            key, f"type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    if part.get("partial_rotary_factor", config.data.get("partial_rotary_factor", 1)) not in (
        1,
        None,
    ):
        raise config.error("partial_rotary_factor", "is set, which is not supported")
    theta = config.positive_number(part, "rope_theta", config.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta)
    factor = config.positive_number(part, "factor", None)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    low = config.positive_number(part, "low_freq_factor", None)
    high = config.positive_number(part, "high_freq_factor", None)
    if high <= low:
        raise config.error("high_freq_factor", f"{high} is not above low_freq_factor {low}")
    original = int(config.positive_number(part, "original_max_position_embeddings", None))
    return RopeConfig(theta, "llama3", factor, low, high, original)


def _eos_token_ids(config: _JsonFile, folder: Path) -> tuple[int, ...]:
    """Return the ids in config.json and in generation_config.json, which often names more."""
    files = [config]
    if (folder / "generation_config.json").exists():
        files.append(_JsonFile(folder / "generation_config.json"))
    ids: dict[int, None] = {}
    for file in files:
        value = file.data.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise file.error("eos_token_id", f"{token_id!r} is not a token id")
            ids[token_id] = None
    return tuple(ids)


def _dtype(config: _JsonFile) -> str:
    key = "dtype" if config.data.get("dtype") is not None else "torch_dtype"
    value = config.data.get(key) or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise config.error(key, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return name
