"""Rotary position embedding: the table of cosines and sines."""

import math

import torch

from tandem.engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return [head_dim / 2] radians per position, in float32.

    "llama3" keeps wavelengths far below the original context, divides those above it by `factor`,
    and blends between (Llama 3.1's release).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    return frequencies


def rope_table(
    rope: RopeConfig, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return [max_len, 2, head_dim]: cosine, and sine negated in its first half, per position."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(
        rope, head_dim
    )
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)], dim=1)
    return table.to(dtype).to(device)
