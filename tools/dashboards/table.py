"""The tables of docs/metrics.md, which a test holds against the metrics of the code."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as its row names it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str


@cache
def documented() -> tuple[Metric, ...]:
    """Return the rows of all tables of metrics."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(("| `tandem_", "| `vllm:"))
    ]
    return tuple(
        Metric(row[0].strip("`"), row[1], tuple(re.findall(r"\w+", row[2])), row[3]) for row in rows
    )
