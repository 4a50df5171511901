"""One self-contained page of measured runs: no script, no request to anywhere."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tandem.bench.load.report import ROWS, short
from tandem.bench.load.runs import Document, Pictured, Side
from tandem.bench.load.sides import LATENCIES
from tandem.bench.picture.charts import charts_of, color_of
from tandem.bench.picture.drawing import STYLE_NAMES, svg_of
from tandem.bench.report.document import write_whole

# metric |-> words of its row
METRICS: Mapping[str, str] = {
    "num_requests": "requests sent",
    "num_succeeded": "requests answered",
    "duration_s": "duration, s",
    "request_throughput": "requests/s",
    "output_token_throughput": "output tokens/s",
    "input_token_throughput": "input tokens/s",
    "goodput": "goodput, requests/s",
    "goodput_share": "share within all limits",
    **{
        f"{name} {mark}": f"{ROWS[name]} {mark}, ms"
        for name in LATENCIES
        for mark in ("p50", "p90", "p99")
    },
}
# metric |-> unit and name, of the figures that a single run shows first
CARDS: Mapping[str, tuple[str, str]] = {
    "request_throughput": ("/s", "requests"),
    "output_token_throughput": ("/s", "output tokens"),
    "ttft p50": ("ms", "TTFT, median"),
    "ttft p99": ("ms", "TTFT, p99"),
    "itl p50": ("ms", "ITL, median"),
    "itl p99": ("ms", "ITL, p99"),
    "goodput_share": ("", "within all limits"),
}
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of every side; `ratio` is the second over the first, where there are two."""

    metric: str
    label: str
    values: Sequence[float | None]
    ratio: float | None


def write_page(path: Path, pictured: Pictured) -> None:
    """Write the page, whole or not at all; folders are made. Raises OSError."""
    write_whole(path, page(pictured).encode())


def page(pictured: Pictured) -> str:
    """Return the HTML of a page; everything from the documents is escaped."""
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string((_HERE / "page.html").read_text(encoding="utf-8"))
    sides = pictured.sides
    return template.render(
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        title=_title(pictured),
        documents=[(document, list(_facts(document))) for document in pictured.documents],
        sides=[(side.label, f"var({STYLE_NAMES[color_of(at)]})") for at, side in enumerate(sides)],
        cards=list(_cards(sides[0])) if len(sides) == 1 else [],
        rows=list(rows_of(sides)),
        warnings=_warnings(pictured),
        drawings=[(chart, svg_of(chart)) for chart in charts_of(sides)],
        how=pictured.documents[0].how,
        short=short,
    )


def rows_of(sides: Sequence[Side]) -> Iterator[Row]:
    """Yield the rows of the table: medians over the rounds, of the metrics that a side has."""
    for metric, label in METRICS.items():
        values = [side.value(metric) for side in sides]
        if any(value is not None for value in values):
            a, b = values if len(values) == 2 else (None, None)
            yield Row(metric, label, values, b / a if a and b is not None else None)


def _title(pictured: Pictured) -> str:
    titles = dict.fromkeys(document.title for document in pictured.documents if document.title)
    return " and ".join(titles) or "tandem bench"


def _cards(side: Side) -> Iterator[tuple[str, str, str]]:
    """Yield the first figures of a single run: value, unit, name."""
    for metric, (unit, name) in CARDS.items():
        if (value := side.value(metric)) is not None:
            yield f"{value:.1%}" if metric == "goodput_share" else short(value), unit, name


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    """Return the facts about a run that a reader needs to repeat it."""
    machine, settings = document.machine, document.settings
    versions = {"Python": machine.get("python", "?"), **(machine.get("libraries") or {})}
    facts = {
        "taken": f"{document.started_at} to {document.ended_at}",
        "command": shlex.join(document.command),
        "server": settings.url,
        "prompts": _in_words(settings.workload),
        "limits (ms)": " ".join(settings.goodput),
        "workers": f"{settings.workers}" if settings.workers > 1 else "",
        "seed": "" if settings.seed is None else f"{settings.seed}",
        "client's machine": _hardware(machine),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": document.commit,
    }
    return ((name, text) for name, text in facts.items() if text)


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items() if value)


def _hardware(machine: Mapping[str, Any]) -> str:
    found = [str(machine[name]) for name in ("gpu", "cpu") if machine.get(name)]
    if cpus := machine.get("num_usable_cpus") or machine.get("num_cpus"):
        found.append(f"{cpus} cores")
    num_bytes = machine.get("memory_bytes")
    if isinstance(num_bytes, int | float):
        found.append(f"{num_bytes / 2**30:.0f} GiB")
    return ", ".join([*found, str(machine.get("platform", ""))])


def _warnings(pictured: Pictured) -> list[str]:
    found = ["interrupted: the figures are of a part"] * any(
        document.interrupted for document in pictured.documents
    )
    for side in pictured.sides:
        begin = f"{side.label}: " if len(pictured.sides) > 1 else ""
        for run in side.rounds:
            found += [f"{begin}{text}" for text in run.warnings]
            errors = ", ".join(f"{count} x {kind}" for kind, count in run.summary.errors.items())
            found += [f"{begin}errors: {errors}"] if errors else []
    if not all(side.good for side in pictured.sides):
        found.append(
            "a run has no single requests, so its curves are missing: take it with --records"
        )
    return list(dict.fromkeys(found))
