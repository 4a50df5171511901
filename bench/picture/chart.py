"""A chart as a value: its axes, its series, and the scales and ticks that both renderers use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]
Style = Literal["steps", "line", "dots"]

NUM_TICKS = 5
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis; a share counts from 0 to 1, and a logarithmic axis has positive values alone."""

    label: str
    is_log: bool = False
    is_share: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A named point of a series, such as a percentile."""

    at: Point
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one label; series of equal `color` belong to one side of a comparison."""

    label: str
    color: int
    points: Sequence[Point]
    marks: Sequence[Mark] = ()
    style: Style = "steps"
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over two axes; `note` is a sentence about reading it.

    Where `is_named` is set, marks have their words beside them.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    is_named: bool = False

    @property
    def points(self) -> list[Point]:
        return [point for each in self.series for point in each.points]


@dataclass(frozen=True, slots=True)
class Scale:
    """The map of an axis's values to 0 to 1, and its ticks."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Return the place of a value, 0 to 1; values outside the scale are at its ends."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def scale_of(axis: Axis, values: Sequence[float]) -> Scale:
    """Return the scale that shows all values: from zero, or from the least on a log axis."""
    if axis.is_share:
        return Scale(0.0, 1.0, False, (0.0, 0.25, 0.5, 0.75, 1.0))
    if axis.is_log:
        return _log_scale([value for value in values if value > 0])
    high = (max(values, default=0.0) or 1.0) * 1.03
    step = _step(high)
    ticks = tuple(index * step for index in range(math.floor(high / step) + 1))
    return Scale(0.0, high, False, ticks)


def _step(high: float) -> float:
    """Return the round distance of about NUM_TICKS ticks from zero to `high`."""
    rough = high / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))


def _log_scale(values: Sequence[float]) -> Scale:
    """Return a scale with ticks at powers of ten, or at 1, 2 and 5 where these are few."""
    low, high = min(values, default=1.0) / 1.1, max(values, default=10.0) * 1.1
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // NUM_TICKS)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    powers = range(first, last + 1, every)
    found = (factor * 10.0**power for power in powers for factor in factors)
    return Scale(low, high, True, tuple(tick for tick in found if low <= tick <= high))


def tick_text(value: float, axis: Axis) -> str:
    """Return a tick in few characters."""
    if axis.is_share:
        return f"{value:.0%}"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"
