"""The charts of measured runs: what each draws into a pair of matplotlib's axes."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.report import PARTS, TITLES
from tandem.bench.load.runs import Side

if TYPE_CHECKING:  # it takes a second to import, and few runs draw
    from matplotlib.axes import Axes

# of sides in turn; the page has others where it is dark
BLUE, ORANGE, GREEN, PURPLE = "#2563c9", "#d9651c", "#2b8f63", "#8a4fc4"
RED, GRAY, TEAL, OCHER = "#b3261e", "#6b7280", "#0e8a9a", "#a3760b"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GRAY, TEAL, OCHER)
HELD, STREAM = "#c9ccd1", "#bcd3f5"
NUM_BINS = 60
NUM_CDF_POINTS = 160
MAX_DOTS, MAX_BARS = 1200, 1000  # of all sides together
MAX_STEPS, MAX_OVER_TIME = 2, 4  # sides whose tokens, or requests, are drawn over time
MIN_MS = 0.1  # shorter times, of tokens read together, are drawn as this one
PERCENTILES = (0.5, 0.9, 0.99)
BAR_INCHES, LEAST_INCHES, MOST_INCHES = 0.15, 1.4, 5.0  # of a request, of all of a side
# metric of a summary |-> words
RATES = {"request_throughput": "answered", "goodput": "within all limits (goodput)"}
# phase |-> its color, and its words
PHASES: Mapping[str, tuple[str, str]] = {
    "held": (HELD, "due, not yet sent"),
    "local": (BLUE, "to the first token, prefilled at the decode worker"),
    "remote": (ORANGE, "to the first token, prefilled remotely"),
    "stream": (STREAM, "answering"),
    "failed": (RED, "failed or cut off"),
}
# course |-> parts of TTFT
STAGES: Mapping[str, Sequence[str]] = {
    "remote": ("outside", "placement", "queue", "prefix_pull", "compute", "answer"),
    "local": ("outside", "prefill"),
}

T = TypeVar("T")
Point = tuple[float, float]
Span = tuple[str, float, float]  # phase, begin and end in seconds


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart to draw; `note` is a sentence about reading it."""

    title: str
    draw: Callable[["Axes"], object]
    note: str = ""
    is_wide: bool = False
    height_inches: float = 3.1


def charts_of(sides: Sequence[Side]) -> list[Chart]:
    """Return every chart that has something to show."""
    sweeps = _sweeps(sides)
    rows = _stage_rows(sides)
    found = _charts_of_requests(sides) if any(side.good for side in sides) else []
    if any(side.request_rate is not None for points in sweeps.values() for side in points):
        note = "Where a line leaves the offered rate, the server is at its limit."
        found.append(Chart("Goodput against rate", partial(_draw_goodput, sweeps), note))
    if sweeps:
        title = "Throughput against the speed of one answer"
        note = "Up is more for the money, right is faster for the reader."
        found.append(Chart(title, partial(_draw_frontier, sweeps), note))
    if rows:
        title, height = "Where the time to first token goes", 1.2 + 0.4 * len(rows)
        found.append(Chart(title, partial(_draw_stages, rows), "", True, height))
    if len(sides) <= MAX_OVER_TIME:
        found += (_timeline(side, len(sides)) for side in sides if side.rounds[0].requests)
    return found


def _charts_of_requests(sides: Sequence[Side]) -> list[Chart]:
    ttft, itl, tokens = plot_charts(sides)
    found = [ttft, itl] if any(map(_gaps_ms, sides)) else [ttft]
    if len(sides) <= MAX_STEPS:
        found.append(tokens)
    if len(sides) <= MAX_OVER_TIME:
        note = (
            "A dot is a request, the line the median around that time. A climb that does not come "
            "back is a queue that grows."
        )
        title = "Time to first token over the run"
        found.append(Chart(title, partial(_draw_over_time, sides), note))
    return found


def plot_charts(sides: Sequence[Side]) -> list[Chart]:
    """Return the three charts of `--plot`, empty ones too."""
    return [
        Chart("Time to first token", partial(_draw_shares, sides, _ttfts_ms)),
        Chart("Inter-token latency", partial(_draw_shares, sides, _gaps_ms)),
        Chart("Output tokens per second", partial(_draw_tokens, sides)),
    ]


def color_of(at: int) -> str:
    """Return the color of a side by its place."""
    return COLORS[at % len(COLORS)]


# ---- distributions ---------------------------------------------------------------------------


def _ttfts_ms(side: Side) -> list[float]:
    return [ms for _, ms in _ttfts_at(side)]


def _ttfts_at(side: Side) -> list[Point]:
    """Return when each request was due, in s, and its TTFT in ms."""
    return [
        (record.scheduled_s, max(ttft_s * 1e3, MIN_MS))
        for record in side.good
        if (ttft_s := record.ttft_s) is not None
    ]


def _gaps_ms(side: Side) -> list[float]:
    return [max(gap_s * 1e3, MIN_MS) for record in side.good for gap_s in record.gaps_s()]


def _draw_shares(
    sides: Sequence[Side], values_ms: Callable[[Side], list[float]], axes: "Axes"
) -> None:
    """Draw the share of samples up to each value, and mark percentiles."""
    shares = np.linspace(0, 1, NUM_CDF_POINTS)
    for at, side in enumerate(sides):
        if ms := values_ms(side):
            axes.plot(np.quantile(ms, shares), shares, color=color_of(at), label=side.label)
            axes.plot(np.quantile(ms, PERCENTILES), PERCENTILES, "o", color=color_of(at), ms=4)
            axes.set_xscale("log")
    axes.set(xlabel="ms", ylim=(0, 1.02))
    axes.set_yticks([0, *PERCENTILES], ["0", *(f"p{share * 100:g}" for share in PERCENTILES)])


# ---- over time -------------------------------------------------------------------------------


def _draw_tokens(sides: Sequence[Side], axes: "Axes") -> None:
    for at, side in enumerate(sides):
        for run in side.rounds:
            if run.good:
                axes.stairs(*tokens_over_time(run.good), color=color_of(at), label=side.label)
    axes.set(xlabel="s since the start", ylabel="tokens/s", ylim=(0, None))


def tokens_over_time(
    records: Sequence[RequestRecord], num_bins: int = NUM_BINS
) -> tuple["np.ndarray", "np.ndarray"]:
    """Return the output tokens per second in each bin of time, and the edges of the bins in s.

    A request's tokens are spread evenly over its output events; without events (not streamed) they
    count at its end.
    """
    times, tokens = [], []
    for record in records:
        events = record.output_times_s or [record.end_s]
        times += events
        tokens += [record.num_output_tokens / len(events)] * len(events)
    counts, edges = np.histogram(times, num_bins, weights=tokens)
    return counts / np.diff(edges), edges


def _draw_over_time(sides: Sequence[Side], axes: "Axes") -> None:
    """Draw every request's TTFT at its scheduled time, with the median of each bin of time."""
    for at, side in enumerate(sides):
        points, color = sorted(_ttfts_at(side)), color_of(at)
        axes.plot(*_columns(thinned(points, MAX_DOTS // len(sides))), ".", color=color, alpha=0.45)
        num_bins = min(NUM_BINS, len(points) // 8)
        bins = np.array_split(points, num_bins) if num_bins > 1 else []
        medians = [tuple(np.median(each, axis=0)) for each in bins]
        axes.plot(*_columns(medians), color=color, label=side.label)
    axes.set(xlabel="s since the start, when a request was due", ylabel="ms", yscale="log")


def thinned(items: Sequence[T], most: int) -> Sequence[T]:
    """Return every so-manieth item, `most` at most."""
    return items[:: max(1, -(-len(items) // most))]


def _columns(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    found = list(points)
    return [x for x, _ in found], [y for _, y in found]


def _timeline(side: Side, num_sides: int) -> Chart:
    """Return the first round's requests as bars."""
    every = sorted(side.rounds[0].requests, key=lambda record: record.scheduled_s)
    shown = thinned(every, MAX_BARS // num_sides)
    height = min(max(len(shown) * BAR_INCHES, LEAST_INCHES), MOST_INCHES)
    left_out = len(every) - len(shown)
    note = f"{len(shown)} of {len(every)} requests, evenly chosen." if left_out else ""
    title = "Requests over time" + (f", {side.label}" if num_sides > 1 else "")
    return Chart(title, partial(_draw_bars, shown, height), note, True, height + 0.9)


def _draw_bars(records: Sequence[RequestRecord], height_inches: float, axes: "Axes") -> None:
    """Draw a row for each request; every phase is one line with gaps."""
    lines: dict[str, list[Point]] = {phase: [] for phase in PHASES}
    for row, record in enumerate(records):
        for phase, begin_s, end_s in spans_of(record):
            if end_s > begin_s:
                lines[phase] += [(begin_s, row), (end_s, row), (np.nan, row)]
    points_per_row = 72 * height_inches / len(records)
    for phase, (color, words) in PHASES.items():
        if lines[phase]:
            axes.plot(
                *_columns(lines[phase]),
                color=color,
                label=words,
                linewidth=0.8 * points_per_row,
                solid_capstyle="butt",
            )
    axes.set(xlabel="s since the start", yticks=[], ylim=(len(records) - 0.5, -0.5))


def spans_of(record: RequestRecord) -> list[Span]:
    """Return the phases of a request, one after another."""
    sent_s = max(record.sent_s, record.scheduled_s)
    end_s = max(record.end_s, sent_s)
    held = ("held", record.scheduled_s, sent_s)
    if not record.succeeded:
        return [held, ("failed", sent_s, end_s)]
    first_s = record.output_times_s[0] if record.output_times_s else end_s
    prefill = "remote" if record.prefill_place == "remote" else "local"
    return [held, (prefill, sent_s, first_s), ("stream", first_s, end_s)]


# ---- several loads ---------------------------------------------------------------------------


def _sweeps(sides: Sequence[Side]) -> dict[str, list[Side]]:
    """Return the points of each sweep by its name."""
    found: dict[str, list[Side]] = {}
    for side in sides:
        if side.curve is not None:
            found.setdefault(side.curve, []).append(side)
    return found


def _of(sweep: str, words: str) -> str:
    return f"{sweep}: {words}" if sweep else words


def _draw_goodput(sweeps: Mapping[str, Sequence[Side]], axes: "Axes") -> None:
    offered = sorted({s.request_rate for sides in sweeps.values() for s in sides if s.request_rate})
    axes.plot(offered, offered, "--", color=GRAY, label="offered")
    curves = [(name, metric) for name in sweeps for metric in RATES]
    for at, (name, metric) in enumerate(curves):
        if points := rates_of(sweeps[name], metric):
            label = _of(name, RATES[metric])
            axes.plot(*_columns(points), "o-", color=color_of(at), ms=4, label=label)
    axes.set(xlabel="offered requests/s", ylabel="requests/s", ylim=(0, None))


def rates_of(sides: Sequence[Side], metric: str) -> list[Point]:
    """Return the offered rate and the metric of each point of a sweep that has both."""
    found = ((side.request_rate, side.value(metric)) for side in sides)
    return sorted((rate, value) for rate, value in found if rate is not None and value is not None)


def _draw_frontier(sweeps: Mapping[str, Sequence[Side]], axes: "Axes") -> None:
    """Draw output tokens per second and worker over the speed that one reader sees."""
    for at, (name, sides) in enumerate(sweeps.items()):
        points = dict(_speeds(sides))
        best = frontier(list(points))
        beaten = [point for point in points if point not in best]
        axes.plot(*_columns(best), "o-", color=color_of(2 * at), label=_of(name, "frontier"))
        if beaten:
            label = _of(name, "beaten by another load")
            axes.plot(*_columns(beaten), "o", color=color_of(2 * at + 1), label=label)
        for point, load in points.items():
            axes.annotate(load, point, (5, 5), textcoords="offset points", fontsize="small")
    is_per_worker = any(side.num_workers > 1 for sides in sweeps.values() for side in sides)
    axes.set(
        xlabel="tokens/s of one answer (1 / median TPOT)",
        ylabel=f"output tokens/s per {'worker' if is_per_worker else 'server'}",
    )
    axes.margins(0.15)


def _speeds(sides: Sequence[Side]) -> Iterable[tuple[Point, str]]:
    for side in sides:
        tpot_ms, rate = side.value("tpot p50"), side.value("output_token_throughput")
        if tpot_ms and rate:
            yield (1e3 / tpot_ms, rate / side.num_workers), side.label


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both values, in order of the first."""
    return sorted(
        point
        for point in set(points)
        if not any(x >= point[0] and y >= point[1] and (x, y) != point for x, y in points)
    )


# ---- parts of the time to first token --------------------------------------------------------

StageRow = tuple[str, str, Mapping[str, float]]  # label, course, part |-> ms


def _stage_rows(sides: Sequence[Side]) -> list[StageRow]:
    """Return the medians of the parts of TTFT; none for servers without timelines."""
    return [
        (f"{side.label}, {TITLES[course]}" if len(sides) > 1 else TITLES[course], course, parts)
        for side in sides
        for course in STAGES
        if (parts := _part_medians(side, course))
    ]


def _part_medians(side: Side, course: str) -> dict[str, float]:
    """Return part |-> median over the rounds of its median in ms."""
    found = [run.summary.breakdown_ms.get(course, {}) for run in side.rounds]
    return {
        part: statistics.median(parts[part].p50 for parts in found if part in parts)
        for part in STAGES[course]
        if any(part in parts for parts in found)
    }


def _draw_stages(rows: Sequence[StageRow], axes: "Axes") -> None:
    every = list(dict.fromkeys(part for course in STAGES.values() for part in course))
    for row, (_, course, parts) in enumerate(rows):
        begin_ms = 0.0
        for part, ms in parts.items():
            color, words = color_of(every.index(part)), PARTS[course][part].strip()
            axes.barh(row, ms, left=begin_ms, height=0.6, color=color, label=words)
            begin_ms += ms
    axes.set_yticks(range(len(rows)), [shortened(label) for label, _, _ in rows])
    axes.set(xlabel="ms, medians of the parts after one another")
    axes.invert_yaxis()


def shortened(label: str) -> str:
    """Return a label for a narrow place."""
    return label if len(label) <= 38 else f"{label[:18]}…{label[-19:]}"
