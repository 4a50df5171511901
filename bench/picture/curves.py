"""The charts of measured runs, from their records and summaries. Pure."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tandem.bench.client.record import RequestRecord
from tandem.bench.picture.chart import Axis, Chart, Mark, Point, Series
from tandem.bench.picture.runs import RunFigures, Side
from tandem.bench.report.figures import percentile

NUM_BINS = 60
NUM_CDF_POINTS = 160
MAX_DOTS = 1200  # of all sides together
MAX_STEPS, MAX_OVER_TIME = 2, 4  # sides whose tokens, or requests, share a chart over time
MIN_MS = 0.1  # shorter times, of tokens read together, are drawn as this one
PERCENTILES = (0.5, 0.9, 0.99)
# metric of a summary |-> words
RATES: Mapping[str, str] = {
    "request_throughput": "answered",
    "goodput": "within all limits (goodput)",
}

T = TypeVar("T")


def charts_of(sides: Sequence[Side]) -> list[Chart]:
    """Return every chart that has something to show."""
    found = [
        _cdf_chart("Time to first token", sides, _ttfts_s),
        _cdf_chart("Inter-token latency", sides, _gaps_s),
        *([tokens_chart(sides)] if len(sides) <= MAX_STEPS else []),
        *([_over_time_chart(sides)] if len(sides) <= MAX_OVER_TIME else []),
        *_load_charts(sides),
    ]
    return [chart for chart in found if chart.points]


def png_charts(sides: Sequence[Side]) -> list[Chart]:
    """Return the three charts of `--plot`, empty ones too."""
    return [
        _cdf_chart("Time to first token", sides, _ttfts_s),
        _cdf_chart("Inter-token latency", sides, _gaps_s),
        tokens_chart(sides),
    ]


# ---- distributions ---------------------------------------------------------------------------


def _ttfts_s(record: RequestRecord) -> Iterable[float]:
    return [] if record.ttft_s is None else [record.ttft_s]


def _gaps_s(record: RequestRecord) -> Iterable[float]:
    return record.gaps_s()


def _cdf_chart(
    title: str, sides: Sequence[Side], seconds_of: Callable[[RequestRecord], Iterable[float]]
) -> Chart:
    series = []
    for color, side in enumerate(sides):
        seconds = (second for record in side.good for second in seconds_of(record))
        ms = sorted(max(second * 1e3, MIN_MS) for second in seconds)
        marks = [
            Mark((value, share), f"p{share * 100:g} {value:.4g} ms")
            for share in PERCENTILES
            if ms and (value := percentile(ms, share))
        ]
        series.append(Series(side.label, color, cdf(ms), marks))
    return Chart(title, Axis("ms", is_log=True), Axis("share", is_share=True), series)


def cdf(ordered: Sequence[float]) -> list[Point]:
    """Return value and share of samples up to it, in NUM_CDF_POINTS steps at most."""
    count = len(ordered)
    places = range(count) if count <= NUM_CDF_POINTS else _spread(count, NUM_CDF_POINTS)
    return [(ordered[place], (place + 1) / count) for place in places]


def _spread(count: int, num_places: int) -> list[int]:
    """Return places from the first to the last, evenly."""
    return [round(index * (count - 1) / (num_places - 1)) for index in range(num_places)]


# ---- over time -------------------------------------------------------------------------------


def tokens_chart(sides: Sequence[Side]) -> Chart:
    """Return the output tokens per second of every side's rounds."""
    series = [
        Series(side.label, color, tokens_over_time(run.good))
        for color, side in enumerate(sides)
        for run in side.rounds
    ]
    return Chart("Output tokens per second", Axis("s since the start"), Axis("tokens/s"), series)


def tokens_over_time(records: Sequence[RequestRecord], num_bins: int = NUM_BINS) -> list[Point]:
    """Return bin starts (s) and output tokens per second in each bin.

    A request's tokens are spread evenly over its output events; without events (not streamed) they
    count at its end.
    """
    points: list[Point] = []
    for record in records:
        times = record.output_times_s or [record.end_s]
        points += [(time_s, record.num_output_tokens / len(times)) for time_s in times]
    if not points:
        return []
    start_s = min(time_s for time_s, _ in points)
    width_s = max(max(time_s for time_s, _ in points) - start_s, 1e-3) / num_bins
    counts = [0.0] * num_bins
    for time_s, num_tokens in points:
        counts[min(int((time_s - start_s) / width_s), num_bins - 1)] += num_tokens
    return [(start_s + at * width_s, count / width_s) for at, count in enumerate(counts)]


def _over_time_chart(sides: Sequence[Side]) -> Chart:
    """Return every request's TTFT at its scheduled time, with the median of each bin of time."""
    series: list[Series] = []
    most = max(1, MAX_DOTS // max(len(sides), 1))
    for color, side in enumerate(sides):
        points = [
            (record.scheduled_s, max(ttft_s * 1e3, MIN_MS))
            for record in side.good
            if (ttft_s := record.ttft_s) is not None
        ]
        series.append(Series(side.label, color, thinned(points, most), style="dots"))
        medians = _medians_over_time(points)
        series.append(Series(side.label, color, medians, style="line"))
    return Chart(
        "Time to first token over the run",
        Axis("s since the start, when a request was due"),
        Axis("ms", is_log=True),
        series,
        "A dot is a request, the line the median around that time. A climb that does not come "
        "back is a queue that grows.",
    )


def thinned(items: Sequence[T], most: int) -> list[T]:
    """Return `most` items at evenly spaced places, or all where they are fewer."""
    if len(items) <= most:
        return list(items)
    return [items[int(index * len(items) / most)] for index in range(most)]


def _medians_over_time(points: Sequence[Point]) -> list[Point]:
    num_bins = min(NUM_BINS, len(points) // 8)
    if num_bins < 2:
        return []
    ordered = sorted(points)
    size = len(ordered) / num_bins
    bins = [ordered[int(at * size) : int((at + 1) * size)] for at in range(num_bins)]
    return [
        (statistics.median(x for x, _ in each), statistics.median(y for _, y in each))
        for each in bins
    ]


# ---- several loads ---------------------------------------------------------------------------


def _load_charts(sides: Sequence[Side]) -> Iterable[Chart]:
    """Yield goodput against rate, and the frontier, of the sweeps."""
    curves = {side.curve: [s for s in sides if s.curve == side.curve] for side in sides}
    sweeps = {name: points for name, points in curves.items() if name is not None}
    if any(side.request_rate is not None for points in sweeps.values() for side in points):
        yield _rate_chart(sweeps)
    if sweeps:
        yield _frontier_chart(sweeps)


def _rate_chart(sweeps: Mapping[str, Sequence[Side]]) -> Chart:
    rated = {
        name: [side for side in points if side.request_rate is not None]
        for name, points in sweeps.items()
    }
    offered = {(side.request_rate or 0.0,) * 2 for points in rated.values() for side in points}
    series = [Series("offered", 5, sorted(offered), style="line", is_dashed=True)]
    for color, (name, metric) in enumerate(itertools.product(rated, RATES)):
        points = _curve(rated[name], metric)
        label = _of(name, RATES[metric])
        series += [Series(label, color, points, _named(points), style="line")] if points else []
    return Chart(
        "Goodput against rate",
        Axis("offered requests/s"),
        Axis("requests/s"),
        series,
        "Where a line leaves the offered rate, the server is at its limit.",
    )


def _of(sweep: str, words: str) -> str:
    return f"{sweep}: {words}" if sweep else words


def _curve(sides: Sequence[Side], metric: str) -> list[Point]:
    found = (
        (side.request_rate or 0.0, side.value(lambda run: getattr(run.summary, metric)))
        for side in sides
    )
    return sorted((x, y) for x, y in found if y is not None)


def _named(points: Sequence[Point]) -> list[Mark]:
    return [Mark(point, f"{point[1]:.4g} at {point[0]:.4g}") for point in points]


def _frontier_chart(sweeps: Mapping[str, Sequence[Side]]) -> Chart:
    """Return output tokens per second and worker over the speed that one reader sees."""
    series: list[Series] = []
    for at, (name, sides) in enumerate(sweeps.items()):
        marks = sorted(_speeds(sides), key=lambda mark: mark.at)
        best = frontier([mark.at for mark in marks])
        shown = [mark for mark in marks if mark.at in best]
        rest = [mark for mark in marks if mark.at not in best]
        beaten = [mark.at for mark in rest]
        series += [
            Series(_of(name, "frontier"), 2 * at, best, shown, style="line"),
            Series(_of(name, "beaten by another load"), 2 * at + 1, beaten, rest, style="dots"),
        ]
    is_per_worker = any(side.num_workers > 1 for sides in sweeps.values() for side in sides)
    return Chart(
        "Throughput against the speed of one answer",
        Axis("tokens/s of one answer (1 / median TPOT)"),
        Axis(f"output tokens/s per {'worker' if is_per_worker else 'server'}"),
        [each for each in series if each.points],
        "Up is more for the money, right is faster for the reader.",
        is_named=True,
    )


def _speeds(sides: Sequence[Side]) -> Iterable[Mark]:
    for side in sides:
        tpot_ms = side.value(_median_tpot_ms)
        rate = side.value(lambda run: run.summary.output_token_throughput)
        if tpot_ms and rate:
            yield Mark((1e3 / tpot_ms, rate / side.num_workers), side.label)


def _median_tpot_ms(run: RunFigures) -> float | None:
    spread = run.summary.latencies_ms.get("tpot")
    return None if spread is None else spread.p50


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both values, in order of the first."""
    best = [
        point
        for point in points
        if not any(x >= point[0] and y >= point[1] and (x, y) != point for x, y in points)
    ]
    return [point for point, _ in itertools.groupby(sorted(best))]
