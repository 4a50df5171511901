"""One self-contained page of measured runs: no script, no request to anywhere."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tandem.bench.load.report import short
from tandem.bench.picture.chart import Chart
from tandem.bench.picture.curves import charts_of
from tandem.bench.picture.runs import Document, Pictured, RunFigures, Side
from tandem.bench.picture.svg import chart_svg, color_class
from tandem.bench.picture.timelines import (
    MAX_TIMELINES,
    phases_of,
    stage_legend,
    stages_svg,
    timeline_svg,
)

LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token",
    "ttst": "time to second token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2el": "end to end",
}
MARKS = ("p50", "p90", "p99")
COUNTS: Mapping[str, str] = {
    "num_requests": "requests sent",
    "num_succeeded": "requests answered",
    "duration_s": "duration, s",
    "request_throughput": "requests/s",
    "output_token_throughput": "output tokens/s",
    "input_token_throughput": "input tokens/s",
    "goodput": "goodput, requests/s",
    "goodput_share": "share within all limits",
}
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of every side; `ratio` is the second over the first, where there are two."""

    metric: str
    label: str
    values: Sequence[float | None]
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart with its legend, which is label |-> color class and percentiles."""

    title: str
    svg: Markup
    legend: Sequence[tuple[str, str, str]]
    note: str = ""


def write_page(path: Path, pictured: Pictured) -> None:
    """Write the page, whole or not at all; folders are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(page(pictured), encoding="utf-8")
    part.replace(path)


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
        sides=[(side.label, color_class(at)) for at, side in enumerate(sides)],
        is_many=len(sides) > 1,
        cards=list(_cards(sides)) if len(sides) == 1 else [],
        rows=list(rows_of(sides)),
        has_ratio=len(sides) == 2,
        warnings=_warnings(pictured),
        drawings=[_drawing(chart) for chart in charts_of(sides)],
        stages=stages_svg(sides),
        stage_legend=stage_legend(sides),
        timelines=list(_timelines(sides)) if len(sides) <= MAX_TIMELINES else [],
        phases=phases_of(sides),
        how=pictured.documents[0].how,
        short=short,
    )


def rows_of(sides: Sequence[Side]) -> Iterator[Row]:
    """Yield the rows of the table: medians over the rounds, of the metrics that a side has."""
    for name, label in COUNTS.items():
        yield from _row(name, label, sides, partial(_count, name=name))
    for name, label in LATENCIES.items():
        for mark in MARKS:
            latency = partial(_latency, name=name, mark=mark)
            yield from _row(f"{name} {mark}", f"{label} {mark}, ms", sides, latency)


def _row(
    metric: str, label: str, sides: Sequence[Side], figure: Callable[[RunFigures], float | None]
) -> Iterator[Row]:
    values = [side.value(figure) for side in sides]
    if any(value is not None for value in values):
        a, b = values if len(values) == 2 else (None, None)
        yield Row(metric, label, values, b / a if a and b is not None else None)


def _count(run: RunFigures, name: str) -> float | None:
    value: float | None = getattr(run.summary, name)
    return value


def _latency(run: RunFigures, name: str, mark: str) -> float | None:
    spread = run.summary.latencies_ms.get(name)
    return None if spread is None else getattr(spread, mark)


def _title(pictured: Pictured) -> str:
    titles = dict.fromkeys(document.title for document in pictured.documents if document.title)
    return " and ".join(titles) or "tandem bench"


def _cards(sides: Sequence[Side]) -> Iterator[tuple[str, str, str]]:
    """Yield the first figures of a single run: value, unit, name."""
    values = {row.metric: row.values[0] for row in rows_of(sides)}
    wanted = {
        "request_throughput": ("/s", "requests"),
        "output_token_throughput": ("/s", "output tokens"),
        "ttft p50": ("ms", "TTFT, median"),
        "ttft p99": ("ms", "TTFT, p99"),
        "itl p50": ("ms", "ITL, median"),
        "itl p99": ("ms", "ITL, p99"),
    }
    for metric, (unit, name) in wanted.items():
        if (value := values.get(metric)) is not None:
            yield short(value), unit, name
    if (share := values.get("goodput_share")) is not None:
        yield f"{share:.1%}", "", "within all limits"


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the facts about a run that a reader needs to repeat it."""
    machine, settings = document.machine, document.settings
    yield "taken", f"{document.started_at} to {document.ended_at}"
    yield "command", shlex.join(document.command)
    if settings.url:
        yield "server", settings.url
    if settings.workload:
        yield "prompts", _in_words(settings.workload)
    if settings.goodput:
        yield "limits (ms)", " ".join(settings.goodput)
    if settings.workers > 1:
        yield "workers", f"{settings.workers}"
    if settings.seed is not None:
        yield "seed", f"{settings.seed}"
    yield "client's machine", _hardware(machine)
    libraries = machine.get("libraries") or {}
    versions = [f"Python {machine.get('python', '?')}", *map(" ".join, _texts(libraries))]
    yield "versions", ", ".join(versions)
    yield "commit", document.commit


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items() if value)


def _texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in values.items()]


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


def _drawing(chart: Chart) -> Drawing:
    legend = {
        (series.label, color_class(series.color)): "  ".join(mark.text for mark in series.marks)
        if chart.y.is_share
        else ""
        for series in chart.series
        if series.points
    }
    found = [(label, color, marks) for (label, color), marks in legend.items()]
    return Drawing(chart.title, chart_svg(chart), found, chart.note)


def _timelines(sides: Sequence[Side]) -> Iterator[tuple[str, Markup, str]]:
    for side in sides:
        found = timeline_svg(side, len(sides))
        if found is not None:
            yield side.label, *found
