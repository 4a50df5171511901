"""A run's picture: distributions of TTFT and ITL, and throughput over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.bench.client.record import RequestRecord

NUM_BINS = 60
MIN_GAP_S = 1e-4  # shorter gaps, of tokens read together, are drawn as this one


def tokens_over_time(
    records: Sequence[RequestRecord], num_bins: int = NUM_BINS
) -> tuple[list[float], list[float]]:
    """Return bin starts (s) and output tokens per second in each bin.

    A request's tokens are spread evenly over its output events; without events (not streamed) they
    count at its end.
    """
    points: list[tuple[float, float]] = []
    for record in records:
        times = record.output_times_s or [record.end_s]
        points += [(time_s, record.num_output_tokens / len(times)) for time_s in times]
    if not points:
        return [], []
    start_s = min(time_s for time_s, _ in points)
    width_s = max(max(time_s for time_s, _ in points) - start_s, 1e-3) / num_bins
    counts = [0.0] * num_bins
    for time_s, num_tokens in points:
        counts[min(int((time_s - start_s) / width_s), num_bins - 1)] += num_tokens
    starts = [start_s + index * width_s for index in range(num_bins)]
    return starts, [count / width_s for count in counts]


def write_plot(path: Path, runs: Mapping[str, Sequence[Sequence[RequestRecord]]]) -> None:
    """Draw the successful records of every label's runs, a color per label. Raises OSError."""
    draw(runs).savefig(path, dpi=120, format="png")


def draw(runs: Mapping[str, Sequence[Sequence[RequestRecord]]]) -> Any:
    """Return the figure: CDFs of TTFT and of ITL, and throughput over time.

    ITL has a logarithmic axis: the longest gap is many times the usual one.
    """
    # matplotlib takes a second to import and few runs plot
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    ttft, itl, throughput = figure.subplots(1, 3)
    for color, (label, rounds) in enumerate(runs.items()):
        for index, records in enumerate(rounds):
            good = [record for record in records if record.succeeded]
            style = {"color": f"C{color}", "drawstyle": "steps-post"}
            style |= {} if index else {"label": label}
            _draw_cdf(ttft, style, [r.ttft_s for r in good if r.ttft_s is not None])
            _draw_cdf(itl, style, [max(gap, MIN_GAP_S) for r in good for gap in r.gaps_s()])
            throughput.plot(*tokens_over_time(good), **style)
    for axes, name in ((ttft, "time to first token"), (itl, "inter-token latency")):
        axes.set(title=f"{name} (CDF)", xlabel="ms", ylabel="share", ylim=(0, 1.02))
    ttft.set_xlim(left=0)
    if itl.has_data():
        itl.set_xscale("log")
    throughput.set(title="output tokens per second", xlabel="s since the start")
    throughput.set_ylim(bottom=0)
    for axes in (ttft, itl, throughput):
        axes.grid(alpha=0.3)
    figure.legend(*throughput.get_legend_handles_labels(), loc="outside lower center")
    return figure


def _draw_cdf(axes: Any, style: Mapping[str, str], seconds: list[float]) -> None:
    ordered = [value * 1e3 for value in sorted(seconds)]
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    if ordered:
        axes.plot(ordered, shares, **style)
