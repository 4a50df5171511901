"""What a time is worth: against the ceilings of the same run, and against its target."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Rate = Literal["matmul", "copy", "read"]
Unit = Literal["TFLOP/s", "TB/s", "GB/s", "1/s", "us", "ms", "s", "%", "passes", "x"]

RESULTS = Path(__file__).resolve().parents[1] / "results"
_HIGHER_IS_BETTER = {
    **dict.fromkeys(("TFLOP/s", "TB/s", "GB/s", "1/s", "x"), True),
    **dict.fromkeys(("us", "ms", "s", "%", "passes"), False),
}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}  # units of time
_HEADINGS = ("figure", "value", "unit", "limit", "ratio", "target", "stretch", "status", "error")
_BUILD_HEADINGS = (
    "figure",
    "kernel",
    "programs",
    "warps x stages",
    "registers",
    "spilled",
    "shared",
    "per SM",
    "instructions",
    "built with",
)


class Goal(msgspec.Struct, frozen=True):
    """What a figure should reach: of its value in its unit, or of its share of the ceiling."""

    target: float
    stretch: float | None = None
    of: Literal["value", "share"] = "value"


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled kernel of a call, and the programs that it was launched with."""

    kernel: str
    grid: tuple[int, ...]
    registers: int  # per thread
    spilled_words: int  # per thread
    shared_bytes: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int
    instructions: tuple[str, ...]  # wgmma, tma and the like, where they are in it
    constants: dict[str, str]  # tile sizes and other options that it is built with


class KernelShare(msgspec.Struct, frozen=True):
    """A kernel's part of the time that the device was busy, as a profile shows it."""

    kernel: str
    num_calls: float  # per step
    ms: float  # per step
    share: float


class Profile(msgspec.Struct, frozen=True):
    """Where the time of a step goes, longest first; of what is not listed only the sum is kept."""

    num_steps: int
    step_ms: float  # of the device's time per step, while it was profiled
    idle_share: float | None  # of that, in which no kernel ran
    kernels: tuple[KernelShare, ...]
    others_ms: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What a section found out about one call; no `seconds` or `values` where it failed."""

    name: str
    label: str
    unit: Unit
    work: float = 0.0  # of one call: operations for TFLOP/s and where matmul bounds it, else bytes
    rate: Rate | None = None  # the ceiling that bounds it
    seconds: tuple[float, ...] = ()  # of one call, per round
    values: tuple[float, ...] = ()  # per round in its unit, of what is no time of `work`
    limit: float | None = None  # in its unit, where it is known without a ceiling
    goal: Goal | None = None
    relative_error: float | None = None
    error_bound: float | None = None
    timed_by: str = ""
    builds: tuple[Build, ...] = ()
    note: str = ""
    profile: Profile | None = None
    failure: str = ""
    unavailable: str = ""  # why not here: of a library that is only compared with


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table. `limit` is the ceiling, or the floor of a time, in the same unit."""

    name: str
    label: str
    unit: Unit
    value: float | None
    samples: tuple[float, ...]
    limit: float | None
    share: float | None
    achieved_per_s: float | None  # operations or bytes
    goal: Goal | None
    status: str
    measurement: Measurement | None = None


def to_figure(measurement: Measurement, ceilings: Mapping[Rate, float], *, is_dry: bool) -> Figure:
    """The measurement in its unit; `ceilings` in operations or bytes per second."""
    ceiling = ceilings.get(measurement.rate) if measurement.rate else None
    samples = _in_unit(measurement, ceiling)
    value = statistics.median(samples) if samples else None
    middle_s = statistics.median(measurement.seconds) if measurement.seconds else None
    limit = measurement.limit if measurement.limit is not None else _limit(measurement, ceiling)
    share = None
    if value and limit:
        share = value / limit if _HIGHER_IS_BETTER[measurement.unit] else limit / value
    return Figure(
        name=measurement.name,
        label=measurement.label,
        unit=measurement.unit,
        value=value,
        samples=samples,
        limit=limit,
        share=share,
        achieved_per_s=measurement.work / middle_s if measurement.work and middle_s else None,
        goal=measurement.goal,
        status=status(measurement.goal, measurement.unit, value, share, is_dry=is_dry)
        if not measurement.failure
        else "failed",
        measurement=measurement,
    )


def versus(
    name: str, label: str, ours: Figure, theirs: Figure, goal: Goal | None, *, is_dry: bool
) -> Figure:
    """How much higher our rate is, round by round; both have been measured, as rates."""
    samples = tuple(mine / other for mine, other in zip(ours.samples, theirs.samples, strict=False))
    value = statistics.median(samples)
    return Figure(
        name=name,
        label=label,
        unit="x",
        value=value,
        samples=samples,
        limit=None,
        share=None,
        achieved_per_s=None,
        goal=goal,
        status=status(goal, "x", value, None, is_dry=is_dry),
    )


def status(
    goal: Goal | None, unit: Unit, value: float | None, share: float | None, *, is_dry: bool
) -> str:
    """met, stretch (met too), missed, open (nothing to judge), dry, or nothing without a goal."""
    if is_dry:
        return "dry"
    if goal is None:
        return ""
    reached = share if goal.of == "share" else value
    if reached is None:
        return "open"
    sign = 1 if goal.of == "share" or _HIGHER_IS_BETTER[unit] else -1
    if goal.stretch is not None and sign * (reached - goal.stretch) >= 0:
        return "stretch"
    return "met" if sign * (reached - goal.target) >= 0 else "missed"


def table(figures: Iterable[Figure]) -> str:
    """The figures as text, a line for each."""
    return _aligned([_HEADINGS, *map(_cells, figures)])


def builds_table(figures: Iterable[Figure]) -> str:
    """What the figures' kernels were compiled to, a line for each launch of a call."""
    measured = (figure.measurement for figure in figures if figure.measurement)
    rows = [_build_cells(one.label, build) for one in measured for build in one.builds]
    return _aligned([_BUILD_HEADINGS, *rows])


def _build_cells(label: str, build: Build) -> tuple[str, ...]:
    return (
        label,
        build.kernel,
        "x".join(map(str, build.grid)),
        f"{build.num_warps} x {build.num_stages}",
        str(build.registers),
        str(build.spilled_words),
        f"{build.shared_bytes / 1024:.0f} KiB",
        str(build.blocks_per_sm),
        ", ".join(build.instructions),
        " ".join(f"{name}={value}" for name, value in build.constants.items()),
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def failures(figures: Iterable[Figure]) -> dict[str, str]:
    """Why figures have no value, by their names."""
    return {
        figure.name: figure.measurement.failure
        for figure in figures
        if figure.measurement is not None and figure.measurement.failure
    }


def results_path(gpu_name: str | None, file_name: str) -> Path:
    """`bench/results/GPU/file_name`, the GPU's name in lower case and dashes; "cpu" for None."""
    folder = re.sub(r"[^a-z0-9]+", "-", (gpu_name or "cpu").lower()).strip("-")
    return RESULTS / folder / file_name


def _in_unit(measurement: Measurement, ceiling: float | None) -> tuple[float, ...]:
    work = measurement.work
    if measurement.values:
        return measurement.values
    match measurement.unit:
        case "TFLOP/s" | "TB/s":
            return tuple(work / one / 1e12 for one in measurement.seconds)
        case "us" | "ms" | "s":
            return tuple(one * _PER_SECOND[measurement.unit] for one in measurement.seconds)
        case "passes":
            return tuple(one * ceiling / work for one in measurement.seconds if ceiling)
        case _:
            return ()


def _limit(measurement: Measurement, ceiling: float | None) -> float | None:
    if ceiling is None or not measurement.work:
        return None
    match measurement.unit:
        case "us" | "ms" | "s":
            return measurement.work / ceiling * _PER_SECOND[measurement.unit]
        case "passes":
            return 1.0
        case _:
            return ceiling / 1e12


def _cells(figure: Figure) -> tuple[str, ...]:
    goal, better = figure.goal, ">=" if _HIGHER_IS_BETTER[figure.unit] else "<="
    target = stretch = ""
    error = figure.measurement.relative_error if figure.measurement else None
    if goal is not None:
        is_share = goal.of == "share"
        form, scale = ("{} {:.4g}%", 100) if is_share else ("{} {:g}", 1)
        better = ">=" if is_share else better
        target = form.format(better, goal.target * scale)
        stretch = "" if goal.stretch is None else form.format(better, goal.stretch * scale)
    return (
        figure.label,
        _number(figure.value),
        figure.unit,
        _number(figure.limit),
        "" if figure.share is None else f"{figure.share:.1%}",
        target,
        stretch,
        figure.status,
        "" if error is None else f"{error:.1e}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
