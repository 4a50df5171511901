"""Rotary position embedding: the tables of cosines and sines, and the order of a head's dimensions.

Kernels rotate dimension i of a head with i + head_dim / 2. Ropes that pair other dimensions, or
leave some as they are, differ in the order of dimensions alone: queries and keys are brought into
the kernels' order with the weights that make them, which leaves their products as they were.
"""

import math

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope_config import RopeConfig

RopeTables = dict[RopeConfig | None, torch.Tensor]  # [max_len, 2, head_dim] each


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2] radians per position, in float32.

    "llama3" keeps wavelengths far below the original context, divides those above it by `factor`,
    and blends between (Llama 3.1's release). "yarn" does so by the turns within the original
    context (arXiv 2309.00071), "longrope" divides each by a factor of its own (arXiv 2402.13753).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    bases = rope.theta**exponents
    frequencies = 1.0 / bases
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.long_factors or rope.short_factors) * bases)
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    if rope.kind == "yarn":
        kept = _yarn_kept(rope, rotary_dim)
        return frequencies * kept + (1.0 - kept) / (rope.factor * bases)
    return frequencies


def _yarn_kept(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2]: 1 where an angle is kept, 0 where it is divided by the factor."""

    def angle_of(num_turns: float) -> float:
        turns = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = angle_of(rope.beta_fast), angle_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    angles = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1.0 - ((angles - first) / ((last - first) or 0.001)).clamp(0, 1)


def rope_table(
    rope: RopeConfig | None,
    head_dim: int,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return [max_len, 2, head_dim]: cosine, and sine negated in its first half, per position.

    Dimensions that do not rotate, all of them for None, have 1 and 0; see `head_order`.
    """
    cos, sin = torch.ones(max_len, head_dim // 2), torch.zeros(max_len, head_dim // 2)
    if rope is not None:
        frequencies = inverse_frequencies(rope, rope.rotary_dim or head_dim)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
        cos[:, : len(frequencies)] = angles.cos() * rope.attention_factor
        sin[:, : len(frequencies)] = angles.sin() * rope.attention_factor
    table = torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)], dim=1)
    return table.to(dtype).to(device)


def query_scales(
    rope: RopeConfig | None, max_len: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return [max_len], by which a query of each position is multiplied; None: by 1."""
    if rope is None or not rope.query_growth:
        return None
    passed = torch.arange(max_len) // rope.original_max_position_embeddings
    return (1 + rope.query_growth * torch.log1p(passed.float())).to(dtype).to(device)


def rope_tables(
    config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device
) -> RopeTables:
    """Return the table of every rope of the model."""
    ropes = {config.layer_kind(layer).rope for layer in range(config.num_layers)}
    return {rope: rope_table(rope, config.head_dim, max_len, dtype, device) for rope in ropes}


def head_order(rope: RopeConfig | None, head_dim: int) -> torch.Tensor | None:
    """Return [head_dim] stored dimensions in the kernels' order; None: the order is the same."""
    if rope is None or not (rope.rotary_dim or rope.interleaved):
        return None
    rotary_dim = rope.rotary_dim or head_dim
    first, second = torch.arange(rotary_dim).chunk(2)
    if rope.interleaved:
        first, second = torch.arange(rotary_dim).view(-1, 2).unbind(1)
    rest = torch.arange(rotary_dim, head_dim).chunk(2) if rotary_dim < head_dim else ()
    if not rest:
        return torch.cat([first, second])
    return torch.cat([first, rest[0], second, rest[1]])
