"""Charts drawn by matplotlib: as one PNG, or each as SVG with the colors of the page's style."""

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tandem.bench.load.runs import Side
from tandem.bench.picture.charts import COLORS, HELD, STREAM, Chart, plot_charts, shortened
from tandem.runtime.errors import ConfigError
from tandem.runtime.extras import install_command

if TYPE_CHECKING:  # it takes a second to import, and few runs draw
    from matplotlib.figure import Figure

INK, RULE = "#656b75", "#e3e4e6"
# a color of a drawing |-> its name in page.css, which has another one where the page is dark
STYLE_NAMES: Mapping[str, str] = {
    **{color: f"--c{at}" for at, color in enumerate(COLORS)},
    HELD: "--held",
    STREAM: "--stream",
    INK: "--quiet",
    RULE: "--rule",
}
WIDTH, WIDE = 5.2, 10.8  # inches
LEGEND_ROW = 0.2
LEAST_RATIO = 1.5  # of a logarithmic axis: equal times are one place, not their last digits
STYLE: Any = {  # matplotlib's names and values
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": RULE,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tandem",
    "text.color": INK,
    "text.parse_math": False,  # labels are words of others
    "xtick.color": INK,
    "ytick.color": INK,
}


def require_matplotlib(option: str) -> None:
    """Raise ConfigError where `option` asks for a drawing and matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib: {install_command('plot')}", param=option)


def write_plot(path: Path, sides: Sequence[Side]) -> None:
    """Draw the successful records of every side, a color per side. Raises OSError."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        drawn(plot_charts(sides)).savefig(path, dpi=120, format="png")


def svg_of(chart: Chart) -> Markup:
    """Return a chart as an SVG element that scales to the width of its place."""
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context(STYLE):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawn([chart]).savefig(written, format="svg", transparent=True, metadata=nothing)
    text = written.getvalue()
    for color, name in STYLE_NAMES.items():
        text = text.replace(color, f"var({name})")
    begin = Markup('<svg role="img" aria-label="{}"').format(chart.title)
    return begin + Markup(text[text.index("<svg") + len("<svg") :])


def drawn(charts: Sequence[Chart]) -> "Figure":
    """Return a figure with the charts beside each other over one legend."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    several = len(charts) > 1
    width = sum(WIDE if chart.is_wide else WIDTH for chart in charts)
    figure = Figure(figsize=(width, max(chart.height_inches for chart in charts)))
    handles: dict[str, Any] = {}
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        chart.draw(axes)
        axes.set_title(chart.title if several else "")
        for log in (axis for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"):
            low, high = log.get_view_interval()
            if high < low * LEAST_RATIO:
                log.set_view_interval(low / LEAST_RATIO, high * LEAST_RATIO, ignore=True)
            log.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            log.set_major_formatter("{x:g}")
            log.set_minor_formatter("")
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(shortened(label), handle)
    if handles:
        num_columns = 1 if width < WIDE and max(map(len, handles)) > 24 else 3
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower left", ncols=num_columns
        )
        height = figure.get_figheight() + LEGEND_ROW * -(-len(handles) // num_columns)
        figure.set_figheight(height)
    return figure
