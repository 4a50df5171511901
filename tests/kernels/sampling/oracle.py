"""Sampling by its definitions, token by token, in plain Python."""

import math
from dataclasses import dataclass, field

import torch

from tandem.kernels.sampling.rows import SamplingRows, TokenAdjustments, uniform

# Masses are rounded in float32: where an edge lies this near to a point, either side is right.
EDGE = 1e-5


@dataclass
class Asked:
    """What one row asks for; `entries`: token id |-> (times, bias, held)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    held_until: int = 0
    entries: dict[int, tuple[int, float, bool]] = field(default_factory=dict)


def as_rows(asked: list[Asked], device: str) -> SamplingRows:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        column([a.temperature for a in asked], torch.float32),
        column([a.top_k for a in asked], torch.int64),
        column([a.top_p for a in asked], torch.float32),
        column([a.min_p for a in asked], torch.float32),
        column([a.seed - (a.seed >> 63 << 64) for a in asked], torch.int64),
        column([a.position for a in asked], torch.int64),
    )


def as_adjustments(asked: list[Asked], device: str) -> TokenAdjustments:
    """The rows' entries in reverse order, and an entry that belongs to no row in front of each."""
    starts, ids, times, biases, held = [], [], [], [], []
    for one in asked:
        ids.append(0)
        times.append(7)
        biases.append(math.nan)
        held.append(False)
        starts.append(len(ids))
        for token_id, (count, bias, is_held) in one.entries.items():
            ids.append(token_id)
            times.append(count)
            biases.append(bias)
            held.append(is_held)

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return TokenAdjustments(
        column(starts, torch.int64),
        column([len(a.entries) for a in asked], torch.int64),
        column(ids, torch.int32),
        column(times, torch.int32),
        column(biases, torch.float32),
        column(held, torch.bool),
        column([a.repetition for a in asked], torch.float32),
        column([a.frequency for a in asked], torch.float32),
        column([a.presence for a in asked], torch.float32),
        column([a.held_until for a in asked], torch.int64),
    )


def adjusted(logits: list[float], asked: Asked) -> list[float]:
    values = list(logits)
    for token_id, (times, bias, held) in asked.entries.items():
        value = values[token_id]
        if times >= 0:
            value = value / asked.repetition if value > 0 else value * asked.repetition
        if times > 0:
            value -= times * asked.frequency + asked.presence
        value += bias
        values[token_id] = -math.inf if held and asked.position < asked.held_until else value
    return values


def acceptable(logits: list[float], asked: Asked) -> set[int]:
    """The token that a row gets, and those which differ from it by a rounding of masses."""
    values = adjusted(logits, asked)
    best = max(values)
    if asked.temperature == 0:
        return {values.index(best)}
    temperature = max(asked.temperature, 1e-6)
    masses = [math.exp((value - best) / temperature) for value in values]
    ranked = sorted(values, reverse=True)
    kept = [mass >= asked.min_p for mass in masses]
    assert not any(abs(mass - asked.min_p) < EDGE * mass < EDGE for mass in masses), "ambiguous"
    if 0 < asked.top_k < len(values):
        kth = ranked[asked.top_k - 1]
        kept = [keep and value >= kth for keep, value in zip(kept, values, strict=True)]
    if asked.top_p < 1:
        wanted = asked.top_p * sum(m for m, keep in zip(masses, kept, strict=True) if keep)
        order = sorted((i for i, keep in enumerate(kept) if keep), key=lambda i: -values[i])
        before, nucleus = 0.0, best
        for index in order:
            ambiguous = abs(before - wanted) < EDGE * wanted
            assert not (ambiguous and values[index] < nucleus), "ambiguous"
            if before >= wanted and index != order[0]:
                break
            nucleus = values[index]
            before += masses[index]
        kept = [keep and value >= nucleus for keep, value in zip(kept, values, strict=True)]
    total = sum(m for m, keep in zip(masses, kept, strict=True) if keep)
    point = uniform(asked.seed, asked.position) * total
    found, upto = set(), 0.0
    for index, (mass, keep) in enumerate(zip(masses, kept, strict=True)):
        if keep and mass > 0:
            slack = EDGE * total if mass > EDGE * total else 0.0
            if upto - slack <= point < upto + mass + slack:
                found.add(index)
            upto += mass
    return found
