"""A run's picture as PNG: distributions of TTFT and ITL, and throughput over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.picture.chart import Axis, Chart, Series
from tandem.bench.picture.curves import png_charts
from tandem.bench.picture.runs import Side


def write_plot(path: Path, sides: Sequence[Side]) -> None:
    """Draw the successful records of every side, a color per side. Raises OSError."""
    draw(png_charts(sides)).savefig(path, dpi=120, format="png")


def draw(charts: Sequence[Chart]) -> Any:
    """Return a matplotlib figure with the charts beside each other."""
    # matplotlib takes a second to import and few runs plot
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(charts), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        axes.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label)
        for series in chart.series:
            (line,) = axes.plot(*_columns(series), color=f"C{series.color}", **_style(series))
            handles.setdefault(series.label, line)
        _set_scales(axes, chart)
        axes.grid(alpha=0.3)
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center")
    return figure


def _columns(series: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in series.points], [y for _, y in series.points]


def _style(series: Series) -> dict[str, str]:
    if series.style == "dots":
        return {"marker": ".", "linestyle": "none"}
    dashes = {"linestyle": "--"} if series.is_dashed else {}
    return dashes | ({"drawstyle": "steps-post"} if series.style == "steps" else {})


def _set_scales(axes: Any, chart: Chart) -> None:
    for name, axis in (("x", chart.x), ("y", chart.y)):
        if axis.is_log and chart.points:
            axes.set(**{f"{name}scale": "log"})
        elif not axis.is_log:
            axes.set(**{f"{name}lim": _limits(axis)})


def _limits(axis: Axis) -> tuple[float, float | None]:
    return (0, 1.02 if axis.is_share else None)
