"""A measured number, held against its target and against the best that it could be. Pure."""

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")
Rate = Literal["matmul", "copy", "read"]  # operations or bytes per second of a device
Verdict = Literal["", "open", "failed", "missed", "within noise", "met", "stretch"]

_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0, "GB/s": 1e-9, "TB/s": 1e-12, "TFLOP/s": 1e-12}
_NUM_RESAMPLES = 400
_MAX_SHOWN = 12  # samples of a figure in a table
_HEADINGS = ("figure", "value", "unit", "ceiling", "share", "target", "verdict", "error", "rounds")


class Target(msgspec.Struct, frozen=True):
    """The most or the least that a value, or its share of the ceiling, should be."""

    kind: Literal["at most", "at least"]
    limit: float
    stretch: float | None = None  # a second limit, beyond the first
    of: Literal["value", "share"] = "value"

    def is_met_by(self, value: float, limit: float | None = None) -> bool:
        """Return whether `value` keeps the limit: the target's own, or the one given."""
        limit = self.limit if limit is None else limit
        return value <= limit if self.kind == "at most" else value >= limit

    def text(self) -> str:
        """Return the target as a cell of a table."""
        sign = "<=" if self.kind == "at most" else ">="
        scale, unit = (1, "") if self.of == "value" else (100, "%")
        limits = [self.limit] if self.stretch is None else [self.limit, self.stretch]
        return f"{sign} " + ", ".join(f"{limit * scale:.4g}{unit}" for limit in limits)


def at_most(limit: float, stretch: float | None = None) -> Target:
    return Target("at most", limit, stretch)


def at_least(
    limit: float, stretch: float | None = None, of: Literal["value", "share"] = "value"
) -> Target:
    return Target("at least", limit, stretch, of)


class Bound(msgspec.Struct, frozen=True):
    """The device's rate that bounds a figure.

    `work` is in operations or bytes: of one call for a figure in units of time, of one unit of
    what the figure counts otherwise.
    """

    rate: Rate
    work: float = 1.0


class Figure(msgspec.Struct, frozen=True):
    """A measured number, one sample per round; its value is their median."""

    name: str
    label: str
    unit: str
    samples: tuple[float, ...] = ()
    target: Target | None = None
    ceiling: float | None = None  # the most a rate can be, the least a time can be
    bound: Bound | None = None  # gives the ceiling once the device's rates are known
    interval: tuple[float, float] | None = None  # holds the value with 90 % certainty
    relative_error: float | None = None  # of the timed call's result
    notes: tuple[str, ...] = ()
    failure: str = ""  # the reason why there are no samples

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def share(self) -> float | None:
        """The share of the ceiling that is reached."""
        if not self.value or not self.ceiling:
            return None
        is_rate = self.unit.endswith("/s")
        return self.value / self.ceiling if is_rate else self.ceiling / self.value

    @property
    def verdict(self) -> Verdict:
        """The judgement by the target; "open" where there is nothing to judge."""
        if self.failure:
            return "failed"
        target = self.target
        if target is None:
            return ""
        reached = self.share if target.of == "share" else self.value
        if reached is None:
            return "open"
        if target.stretch is not None and target.is_met_by(reached, target.stretch):
            return "stretch"
        if target.is_met_by(reached):
            return "met"
        return "within noise" if any(map(target.is_met_by, self.interval or ())) else "missed"

    def with_ceiling(self, rates: Mapping[Rate, float]) -> "Figure":
        """Return the figure with the ceiling that its bound gives at these rates per second."""
        if self.bound is None or self.bound.rate not in rates:
            return self
        rate, scale = rates[self.bound.rate], _SCALES[self.unit]
        per_work = rate / self.bound.work if self.unit.endswith("/s") else self.bound.work / rate
        return msgspec.structs.replace(self, ceiling=per_work * scale)

    def to_json(self) -> dict[str, Any]:
        derived = {"value": self.value, "share": self.share, "verdict": self.verdict}
        return {**msgspec.to_builtins(self), **derived}


def counted(
    name: str, label: str, count: int, most: float = 0.0, notes: tuple[str, ...] = ()
) -> Figure:
    """Return a count, which is a failure above `most`."""
    return required(Figure(name, label, "", (float(count),), at_most(most), notes=notes))


def required(figure: Figure) -> Figure:
    """Return the figure, as a failure where it misses its target."""
    if figure.target is None or figure.verdict in ("met", "stretch"):
        return figure
    failure = f"{_number(figure.value)} where {figure.target.text()} is required"
    return msgspec.structs.replace(figure, failure=failure)


def measured(figures: Iterable[Figure], rounds: Sequence[Mapping[str, float]]) -> list[Figure]:
    """Return the figures with a sample from each round; rounds hold values by figures' names."""
    return [
        msgspec.structs.replace(figure, samples=tuple(each[figure.name] for each in rounds))
        for figure in figures
    ]


def in_unit(seconds: Iterable[float], unit: str, work: float = 0.0) -> tuple[float, ...]:
    """Return the seconds of calls in a unit of time, or as a rate of `work` per call."""
    scale = _SCALES[unit]
    if unit.endswith("/s"):
        return tuple(work / one * scale for one in seconds)
    return tuple(one * scale for one in seconds)


def per_second(figure: Figure) -> float:
    """Return the value of a measured rate in operations or bytes per second."""
    assert figure.value is not None
    return figure.value / _SCALES[figure.unit]


def percentile(samples: Iterable[float], share: float) -> float:
    """Return the percentile by linear interpolation between the two nearest ranks.

    Raises ValueError when there are no samples.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("percentile of no values")
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def medians(rounds: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Return the median of each round."""
    return tuple(statistics.median(samples) for samples in rounds)


def flat(rounds: Iterable[Sequence[T]]) -> list[T]:
    """Return the samples of all rounds."""
    return [sample for samples in rounds for sample in samples]


def ratio(
    name: str,
    label: str,
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    target: Target | None = None,
) -> Figure:
    """Return the ratio of two sides' medians within each round, with its interval."""
    pairs = zip(medians(above), medians(below), strict=True)
    samples = tuple(a / b for a, b in pairs)
    interval = ratio_interval(flat(above), flat(below))
    return Figure(name, label, "x", samples, target, interval=interval)


def ratio_interval(samples: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the ratio of two medians, at 90 % certainty, by resampling both."""
    draw = random.Random(0)
    ratios = [
        statistics.median(draw.choices(samples, k=len(samples)))
        / max(statistics.median(draw.choices(others, k=len(others))), 1e-9)
        for _ in range(_NUM_RESAMPLES)
    ]
    return percentile(ratios, 0.05), percentile(ratios, 0.95)


def table(figures: Iterable[Figure]) -> str:
    """Return the figures as text, a line for each; columns without content are left out."""
    rows = [_HEADINGS, *map(_cells, figures)]
    used = [at for at in range(len(_HEADINGS)) if any(row[at] for row in rows[1:])]
    return aligned([[row[at] for at in used] for row in rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cells(figure: Figure) -> tuple[str, ...]:
    return (
        figure.label,
        _number(figure.value),
        figure.unit,
        _number(figure.ceiling),
        "" if figure.share is None else f"{figure.share:.1%}",
        "" if figure.target is None else figure.target.text(),
        figure.verdict,
        "" if figure.relative_error is None else f"{figure.relative_error:.1e}",
        " ".join(map(_number, figure.samples)) if 1 < len(figure.samples) <= _MAX_SHOWN else "",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
