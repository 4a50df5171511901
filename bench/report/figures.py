"""Figures against their targets: a plain table, and JSON that says where they come from.

Needs the standard library and torch alone: a GPU machine has little else.
"""

import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

SCHEMA_VERSION = 1
_LIBRARIES = ("tandem-serve", "torch", "triton", "nixl-cu13", "nixl-cu12", "cupy-cuda13x", "numpy")
_NUM_RESAMPLES = 400


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `rounds` has one value per round, and `value` is their median."""

    name: str
    label: str
    unit: str
    rounds: tuple[float, ...]
    limit: float | None = None
    kind: Literal["at most", "at least"] = "at most"
    interval: tuple[float, float] | None = None  # where the value lies with 90 % certainty
    note: str = ""
    value: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", statistics.median(self.rounds))

    @property
    def verdict(self) -> str:
        """Against the limit: yes, no, or that the noise is too large to tell."""
        if self.limit is None:
            return ""
        sign = 1 if self.kind == "at most" else -1
        if sign * (self.limit - self.value) >= 0:
            return "yes"
        if self.interval is not None and any(
            sign * (self.limit - end) >= 0 for end in self.interval
        ):
            return "within noise"
        return "no"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def percentile(samples: Sequence[float], share: float) -> float:
    """By linear interpolation between the two nearest ranks."""
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def medians(rounds: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The median of each round."""
    return tuple(statistics.median(samples) for samples in rounds)


def flat(rounds: Iterable[Sequence[float]]) -> list[float]:
    """The samples of all rounds."""
    return [sample for samples in rounds for sample in samples]


def ratio_interval(samples: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Where the ratio of two medians lies with 90 % certainty, by resampling both."""
    draw = random.Random(0)
    ratios = sorted(
        statistics.median(draw.choices(samples, k=len(samples)))
        / max(statistics.median(draw.choices(others, k=len(others))), 1e-9)
        for _ in range(_NUM_RESAMPLES)
    )
    return percentile(ratios, 0.05), percentile(ratios, 0.95)


def table(figures: Iterable[Figure]) -> str:
    """The figures as text, a line for each."""
    rows = [("figure", "median", "unit", "target", "ok", "rounds")]
    for figure in figures:
        sign = "<=" if figure.kind == "at most" else ">="
        target = "" if figure.limit is None else f"{sign} {figure.limit:g}"
        rounds = " ".join(f"{value:.4g}" for value in figure.rounds)
        rows.append(
            (figure.label, f"{figure.value:.4g}", figure.unit, target, figure.verdict, rounds)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def document(
    *,
    command: Sequence[str],
    settings: Mapping[str, Any],
    started_at: datetime,
    figures: Sequence[Figure],
    how: Mapping[str, str],
    commit: str = "",
) -> dict[str, Any]:
    """The figures with the command, the commit and the machine that gave them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": utc_now().isoformat(timespec="seconds"),
        "command": list(command),
        "commit": commit or this_commit(),
        "settings": dict(settings),
        "machine": machine(),
        "how": dict(how),
        "figures": {figure.name: figure.to_json() for figure in figures},
    }


def this_commit() -> str:
    """The commit of the code that runs, "+" when it was changed since; "unknown" without git."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load_average": os.getloadavg(),
        "gpu": gpu,
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name))},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("UCX_", "NIXL_", "PYTORCH_", "OMP_NUM"))
        },
    }


def utc_now() -> datetime:
    return datetime.now(UTC)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
