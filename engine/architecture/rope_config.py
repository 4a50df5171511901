"""Rotary embedding as config.json gives it, in the form of transformers 5 and the one before."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tandem.engine.architecture.json_file import MOST, JsonObject
from tandem.engine.architecture.spec import Architecture

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The angles by which heads turn; a kind reads the fields that are named after it."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 0  # tokens; llama3, yarn, longrope
    rotary_dim: int = 0  # leading dimensions of a head that turn; 0: all
    interleaved: bool = False  # neighbors turn together, not halves
    attention_factor: float = 1.0  # times cosine and sine
    query_growth: float = 0.0  # of queries, with the logarithm of how often they pass the original
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the blend begins and ends at whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope, of each angle
    long_factors: tuple[float, ...] = ()  # longrope; none: the short ones are in use


def read_ropes(config: JsonObject, architecture: Architecture, head_dim: int) -> list[RopeConfig]:
    """Return the rope of layers that see their whole context and that of layers with a window."""
    reader = _Reader(config, architecture, head_dim)
    key = "rope_parameters" if config.data.get("rope_parameters") else "rope_scaling"
    part = config.part(key) if config.data.get(key) else config.empty_part(key)
    if part.data.get("full_attention"):
        is_split = part.data.get("sliding_attention")
        local = "sliding_attention" if is_split else "full_attention"
        return [reader.read(part.part(each)) for each in ("full_attention", local)]
    rope = reader.read(part)
    if not architecture.local_rope:
        return [rope, rope]
    theta = config.number(architecture.local_rope, rope.theta)
    return [rope, RopeConfig(theta, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved)]


def with_positions(config: JsonObject, rope: RopeConfig) -> JsonObject:
    """Return the same object with the positions that YaRN gives the model.

    Model cards say to add YaRN to a config.json and leave `max_position_embeddings` as it is.
    """
    if rope.kind != "yarn":
        return config
    key = "max_position_embeddings"
    most = extended_positions(
        config.positive(key), rope.original_max_position_embeddings, rope.factor
    )
    if most > MOST[key]:
        raise config.error("rope_scaling", f"a factor of {rope.factor} gives {most} positions")
    return config.with_changes({key: most})


def extended_positions(positions: int, original: int, factor: float) -> int:
    """Return the positions of a model with YaRN from `original` ones on."""
    return max(positions, round(original * factor))


@dataclass(frozen=True, slots=True)
class _Reader:
    config: JsonObject
    architecture: Architecture
    head_dim: int

    def read(self, part: JsonObject) -> RopeConfig:
        """Return the rope in `part`; keys that stand beside it in old files count too."""
        kind = part.data.get("rope_type", part.data.get("type", "default"))
        kind = "longrope" if kind == "su" else kind  # the name in the first files of Phi-3
        if kind not in ROPE_KINDS:
            supported = ", ".join(ROPE_KINDS)
            raise part.whole_error(f"type {kind!r} is not supported; supported: {supported}")
        theta = part.number("rope_theta", self.config.number("rope_theta", 10_000.0))
        rope = RopeConfig(
            theta, rotary_dim=self._rotary_dim(part), interleaved=self.architecture.rope_interleaved
        )
        return rope if kind == "default" else self._scaled(rope, kind, part)

    def _rotary_dim(self, part: JsonObject) -> int:
        key = "partial_rotary_factor"
        share = part.number(key, self.config.number(key, 1.0))
        rotary_dim = int(self.head_dim * share)
        if share > 1 or rotary_dim < 2 or rotary_dim % 2:
            raise part.error(key, f"{share} of {self.head_dim} is no even number of dimensions")
        return 0 if rotary_dim == self.head_dim else rotary_dim

    def _scaled(self, rope: RopeConfig, kind: RopeKind, part: JsonObject) -> RopeConfig:
        if kind == "linear":
            return replace(rope, kind=kind, factor=part.number("factor"))
        original = self._original(part)
        rope = replace(rope, kind=kind, original_max_position_embeddings=original)
        if kind == "llama3":
            low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
            if high <= low:
                raise part.error("high_freq_factor", f"{high} is not above low_freq_factor {low}")
            return replace(
                rope, factor=part.number("factor"), low_freq_factor=low, high_freq_factor=high
            )
        growth = self.config.positive("max_position_embeddings") / original
        factor = part.number("factor", growth)
        if kind == "yarn":
            return self._yarn(replace(rope, factor=factor), part)
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return replace(
            rope,
            attention_factor=part.number("attention_factor", default),
            short_factors=self._factors(part, "short_factor"),
            long_factors=self._factors(part, "long_factor"),
        )

    def _original(self, part: JsonObject) -> int:
        """Return the positions of the pretraining; beside the rope they count more than in it."""
        key = "original_max_position_embeddings"
        most = self.config.positive("max_position_embeddings")
        original = self.config.positive(key, part.positive(key, most))
        if original < 2:
            raise part.error(key, f"{original} is below 2")
        return original

    def _yarn(self, rope: RopeConfig, part: JsonObject) -> RopeConfig:
        fast, slow = part.number("beta_fast", 32.0), part.number("beta_slow", 1.0)
        if fast <= slow:
            raise part.error("beta_fast", f"{fast} is not above beta_slow {slow}")
        if rope.theta <= 1:
            raise part.error("rope_theta", f"{rope.theta} is not above 1")
        attention_factor = _mscale(rope.factor, 1.0)
        if part.data.get("mscale") and part.data.get("mscale_all_dim"):
            attention_factor = _mscale(rope.factor, part.number("mscale"))
            attention_factor /= _mscale(rope.factor, part.number("mscale_all_dim"))
        return replace(
            rope,
            attention_factor=part.number("attention_factor", attention_factor),
            beta_fast=fast,
            beta_slow=slow,
            query_growth=self._query_growth(part),
            truncate=part.data.get("truncate") is not False,
        )

    def _query_growth(self, part: JsonObject) -> float:
        key = "llama_4_scaling_beta"
        is_read = key in self.architecture.reads and part.data.get(key)
        return part.number(key) if is_read else 0.0

    def _factors(self, part: JsonObject, key: str) -> tuple[float, ...]:
        values = part.data.get(key)
        num_angles = (self._rotary_dim(part) or self.head_dim) // 2
        if not isinstance(values, list) or len(values) != num_angles:
            raise part.error(key, f"must be a list of {num_angles} numbers, one of each angle")
        return tuple(part.number_of(key, value) for value in values)


def _mscale(factor: float, times: float) -> float:
    return 0.1 * times * math.log(factor) + 1.0 if factor > 1 else 1.0
