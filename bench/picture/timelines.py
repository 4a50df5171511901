"""Requests as bars over time, and the stages of a first token as bars, in SVG."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.report import PARTS, TITLES
from tandem.bench.picture.chart import Axis, Scale, scale_of
from tandem.bench.picture.curves import thinned
from tandem.bench.picture.runs import Side
from tandem.bench.picture.svg import BOTTOM, TOP, Frame, color_class, figure, text
from tandem.bench.report.figures import percentile

MAX_BARS = 1000  # of a whole page
WIDTH = 1080
LEFT = 20
MIN_HEIGHT, MAX_HEIGHT = 60, 420  # of the bars of one side
ROW = 14  # pixels of one request, where there are few
STAGE_LEFT, STAGE_ROW = 250, 34

# class |-> words of the legend
PHASES: Mapping[str, str] = {
    "held": "due, not yet sent",
    "local": "to the first token, prefilled at the decode worker",
    "remote": "to the first token, prefilled remotely",
    "stream": "answering",
    "failed": "failed or cut off",
}
# course |-> part of TTFT |-> color
STAGES: Mapping[str, Mapping[str, int]] = {
    "remote": {
        "outside": 5,
        "placement": 3,
        "queue": 1,
        "prefix_pull": 7,
        "compute": 0,
        "answer": 2,
    },
    "local": {"outside": 5, "prefill": 6},
}
MAX_TIMELINES = 4  # sides whose requests are drawn

Span = tuple[str, float, float]  # phase, begin and end in seconds


def timeline_svg(side: Side, num_sides: int) -> tuple[Markup, str] | None:
    """Return the first round's requests as bars, and a sentence where some are left out."""
    every = sorted(side.rounds[0].requests, key=lambda record: record.scheduled_s)
    if not every:
        return None
    shown = thinned(every, max(1, MAX_BARS // num_sides))
    height = min(max(len(shown) * ROW, MIN_HEIGHT), MAX_HEIGHT) + TOP + BOTTOM
    end_s = max(each for record in every for _, _, each in spans_of(record))
    frame = Frame(
        scale_of(Axis("s"), [end_s]), Scale(0, len(shown), False, ()), WIDTH, height, LEFT
    )
    paths: dict[str, list[str]] = defaultdict(list)
    for row, record in enumerate(reversed(shown)):
        y = frame.y(row + 0.5)
        for phase, begin_s, until_s in spans_of(record):
            paths[phase].append(f"M{frame.x(begin_s):.1f} {y:.1f}H{frame.x(until_s):.1f}")
    thickness = max((frame.bottom - frame.top) / len(shown) * 0.8, 0.4)
    drawn = [
        Markup('<path class="bar {}" stroke-width="{:.2f}" d="{}"/>').format(
            phase, thickness, "".join(paths[phase])
        )
        for phase in PHASES
        if paths[phase]
    ]
    left_out = len(every) - len(shown)
    note = f"{len(shown)} of {len(every)} requests, evenly chosen." if left_out else ""
    parts = [frame.x_axis(Axis("s since the start")), *drawn]
    return figure(f"Requests of {side.label}", WIDTH, height, parts), note


def spans_of(record: RequestRecord) -> Iterator[Span]:
    """Yield the phases of a request, one after another."""
    sent_s = max(record.sent_s, record.scheduled_s)
    end_s = max(record.end_s, sent_s)
    yield "held", record.scheduled_s, sent_s
    if not record.succeeded:
        yield "failed", sent_s, end_s
        return
    first_s = record.output_times_s[0] if record.output_times_s else end_s
    yield "remote" if record.prefill_place == "remote" else "local", sent_s, first_s
    yield "stream", first_s, end_s


def phases_of(sides: Sequence[Side]) -> dict[str, str]:
    """Return the legend of the phases that the sides have."""
    found = {
        phase
        for side in sides
        for record in side.rounds[0].requests
        for phase, begin_s, end_s in spans_of(record)
        if end_s - begin_s > 1e-3
    }
    return {phase: words for phase, words in PHASES.items() if phase in found}


def stages_svg(sides: Sequence[Side]) -> Markup | None:
    """Return the median of each part of TTFT as bars; None for servers without timelines."""
    rows = [
        (_row_label(side, sides, TITLES[course]), course, parts)
        for side in sides
        for course in STAGES
        if (parts := _medians(side, course))
    ]
    if not rows:
        return None
    height = len(rows) * STAGE_ROW + TOP + BOTTOM
    scale = scale_of(Axis("ms"), [sum(parts.values()) for _, _, parts in rows])
    frame = Frame(scale, Scale(0, len(rows), False, ()), WIDTH, height, STAGE_LEFT)
    drawn = [frame.x_axis(Axis("ms, medians of the parts after one another"))]
    for row, (label, course, parts) in enumerate(reversed(rows)):
        y, begin_ms = frame.y(row + 0.5), 0.0
        drawn.append(text(STAGE_LEFT - 10, y + 4, _short(label), "end"))
        for part, ms in parts.items():
            name = PARTS[course][part].strip()
            drawn.append(_stage(frame, y, (begin_ms, begin_ms + ms), name, STAGES[course][part]))
            begin_ms += ms
    return figure("Parts of the time to first token", WIDTH, height, drawn)


def stage_legend(sides: Sequence[Side]) -> dict[str, str]:
    """Return color class |-> words of every part that the bars have."""
    return {
        color_class(STAGES[course][part]): PARTS[course][part].strip()
        for side in sides
        for course in STAGES
        for part in _medians(side, course)
    }


def _stage(frame: Frame, y: float, span: tuple[float, float], name: str, color: int) -> Markup:
    begin, end = frame.x(span[0]), frame.x(span[1])
    bar = Markup(
        '<rect class="fill {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="20">'
        "<title>{}: {:.4g} ms</title></rect>"
    )
    return bar.format(
        color_class(color), begin, y - 10, max(end - begin, 0.5), name, span[1] - span[0]
    )


def _medians(side: Side, course: str) -> dict[str, float]:
    """Return part |-> median over the rounds of its median in ms."""
    found: dict[str, float] = {}
    for part in STAGES[course]:
        values = [
            spread.p50
            for run in side.rounds
            if (spread := run.summary.breakdown_ms.get(course, {}).get(part)) is not None
        ]
        if values:
            found[part] = percentile(values, 0.5)
    return found


def _row_label(side: Side, sides: Sequence[Side], course: str) -> str:
    return f"{side.label}, {course}" if len(sides) > 1 else course


def _short(label: str) -> str:
    return label if len(label) <= 38 else f"{label[:18]}…{label[-19:]}"
