"""Charts as inline SVG, whose colors are the page's style classes."""

from collections.abc import Iterator, Sequence

from markupsafe import Markup, escape

from tandem.bench.picture.chart import Axis, Chart, Point, Scale, Series, scale_of, tick_text

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 46
NUM_COLORS = 8
PERCENTILE_TICKS = (0.0, 0.5, 0.9, 0.99)


def chart_svg(chart: Chart) -> Markup:
    """Return a chart as SVG, its labels escaped."""
    x = scale_of(chart.x, [point[0] for point in chart.points])
    y = scale_of(chart.y, [point[1] for point in chart.points])
    frame = Frame(x, y, WIDTH, HEIGHT)
    parts = [
        frame.grid(chart.x, chart.y),
        *(_drawn(series, frame) for series in chart.series),
        *(_marks(series, frame, is_named=chart.is_named) for series in chart.series),
    ]
    return figure(chart.title, WIDTH, HEIGHT, parts)


def figure(title: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    """Return an SVG element that scales to the width of its place."""
    begin = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        width, height, title
    )
    return begin + Markup("").join(parts) + Markup("</svg>")


class Frame:
    """The part of a drawing that shows values, and the pixels of a point."""

    def __init__(self, x: Scale, y: Scale, width: int, height: int, left: int = LEFT) -> None:
        self._x, self._y = x, y
        self.left, self.right = left, width - RIGHT
        self.top, self.bottom = TOP, height - BOTTOM

    def x(self, value: float) -> float:
        return self.left + self._x.at(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self._y.at(value) * (self.bottom - self.top)

    def at(self, point: Point) -> tuple[float, float]:
        """Return the pixels of a point."""
        return self.x(point[0]), self.y(point[1])

    def grid(self, x_axis: Axis, y_axis: Axis) -> Markup:
        """Return the grid with its numbers, and the axes' labels."""
        y_ticks = PERCENTILE_TICKS if y_axis.is_share else self._y.ticks
        rows = [(self.y(tick), _share_text(tick, y_axis)) for tick in y_ticks]
        lines = [f"M{self.left} {at:.1f}H{self.right}" for at, _ in rows]
        texts = [text(self.left - 8, at + 4, label, "end") for at, label in rows]
        return (
            Markup('<path class="grid" d="{}"/>').format("".join(lines))
            + Markup("").join(texts)
            + self.x_axis(x_axis)
            + Markup('<text class="name" x="{}" y="{}" transform="rotate(-90 13 {})" ').format(
                13, (self.top + self.bottom) // 2, (self.top + self.bottom) // 2
            )
            + Markup('text-anchor="middle">{}</text>').format(y_axis.label)
        )

    def x_axis(self, axis: Axis) -> Markup:
        """Return the vertical lines of the grid, their numbers and the axis's label."""
        lines = "".join(f"M{self.x(tick):.1f} {self.top}V{self.bottom}" for tick in self._x.ticks)
        texts = [
            text(self.x(tick), self.bottom + 17, tick_text(tick, axis)) for tick in self._x.ticks
        ]
        middle = (self.left + self.right) // 2
        return (
            Markup('<path class="grid" d="{}"/>').format(lines)
            + Markup("").join(texts)
            + text(middle, self.bottom + 37, axis.label, kind="name")
        )


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> Markup:
    """Return a line of text."""
    place = Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">').format(
        kind, x, y, anchor
    )
    return place + escape(words) + Markup("</text>")


def color_class(color: int) -> str:
    """Return the style class of a side's color."""
    return f"c{color % NUM_COLORS}"


def _share_text(tick: float, axis: Axis) -> str:
    return f"p{tick * 100:g}" if axis.is_share and tick else tick_text(tick, axis)


def _drawn(series: Series, frame: Frame) -> Markup:
    pixels = [frame.at(point) for point in series.points]
    if series.style == "dots":
        path = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in pixels)
    elif series.style == "steps":
        path = "".join(_steps(pixels))
    else:
        path = "".join(f"{'L' if at else 'M'}{x:.1f} {y:.1f}" for at, (x, y) in enumerate(pixels))
    kind = "dots" if series.style == "dots" else "line"
    dashed = " dashed" if series.is_dashed else ""
    return Markup('<path class="{} {}{}" d="{}"/>').format(
        kind, color_class(series.color), dashed, path
    )


def _steps(pixels: Sequence[tuple[float, float]]) -> Iterator[str]:
    for at, (x, y) in enumerate(pixels):
        yield f"H{x:.1f}V{y:.1f}" if at else f"M{x:.1f} {y:.1f}"


def _marks(series: Series, frame: Frame, *, is_named: bool) -> Markup:
    dot = Markup('<circle class="mark {}" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>')
    found = []
    for at, mark in enumerate(series.marks):
        x, y = frame.at(mark.at)
        found.append(dot.format(color_class(series.color), x, y, f"{series.label}: {mark.text}"))
        if is_named:
            is_right = x > (frame.left + frame.right) / 2
            anchor = "end" if is_right else "start"
            aside, above = (-9 if is_right else 9), (-5 if at % 2 else 14)
            found.append(text(x + aside, y + above, mark.text, anchor, "label"))
    return Markup("").join(found)
