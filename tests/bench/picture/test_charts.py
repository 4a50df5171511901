"""The charts of measured runs, and their PNG."""

from pathlib import Path

import pytest

from tandem.bench.picture.chart import Axis, scale_of
from tandem.bench.picture.curves import (
    NUM_CDF_POINTS,
    cdf,
    charts_of,
    frontier,
    png_charts,
    tokens_over_time,
)
from tandem.bench.picture.png import draw, write_plot
from tandem.bench.picture.runs import Side
from tests.bench.picture.runs import answered, run, side


def test_one_long_gap_leaves_the_usual_ones_to_be_seen(tmp_path: Path) -> None:
    sides = [Side("bench", [run([answered(0.1, 0.1, 0.11, 0.12, 5.0)])])]
    _, itl, _ = draw(png_charts(sides)).axes
    low, high = itl.get_xlim()
    usual_ms = itl.transAxes.inverted().transform(itl.transData.transform((10.0, 0)))[0]
    assert 0 < low <= 0.1 and high >= 4880
    assert 0.2 < usual_ms < 0.8
    write_plot(tmp_path / "run.png", sides)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_answers_is_drawn_empty(tmp_path: Path) -> None:
    write_plot(tmp_path / "run.png", [Side("bench", [run([])])])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_distribution_keeps_its_ends_in_few_points() -> None:
    points = cdf([float(value) for value in range(1, 10_001)])
    assert len(points) == NUM_CDF_POINTS
    assert points[0] == (1.0, 1e-4) and points[-1] == (10_000.0, 1.0)
    assert cdf([1.0, 3.0]) == [(1.0, 0.5), (3.0, 1.0)]


def test_no_token_is_lost_over_time() -> None:
    points = tokens_over_time([answered(0.5, 1.0, 2.0), answered(0.7, 0.8)], num_bins=3)
    assert [time_s for time_s, _ in points] == [0.5, 1.0, 1.5]
    assert sum(rate * 0.5 for _, rate in points) == pytest.approx(5)


def test_the_frontier_has_no_point_that_another_beats_in_both_values() -> None:
    assert frontier([(1, 9), (2, 8), (2, 5), (3, 8), (5, 1), (4, 0)]) == [(1, 9), (3, 8), (5, 1)]


def test_each_sweep_is_one_curve_of_goodput_and_one_frontier() -> None:
    sides = [
        side("old: 4 requests/s", 0.1, 4.0, "old"),
        side("old: 8 requests/s", 0.3, 8.0, "old"),
        side("4 requests/s", 0.1, 4.0, ""),
        side("8 requests/s", 0.1, 8.0, ""),
    ]
    charts = {chart.title: chart for chart in charts_of(sides)}
    curves = {each.label: each.points for each in charts["Goodput against rate"].series}
    assert [rate for rate, _ in curves["within all limits (goodput)"]] == [4.0, 8.0]
    assert [good > 0 for _, good in curves["old: within all limits (goodput)"]] == [True, False]
    assert curves["offered"] == [(4.0, 4.0), (8.0, 8.0)]
    speeds = charts["Throughput against the speed of one answer"]
    assert {"frontier", "old: frontier"} <= {each.label for each in speeds.series}


def test_two_runs_at_different_rates_are_no_sweep() -> None:
    titles = [chart.title for chart in charts_of([side("a", 0.1, 4.0), side("b", 0.1, 8.0)])]
    assert "Time to first token" in titles and "Goodput against rate" not in titles


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [0.1, 1e5], [3e6]])
@pytest.mark.parametrize("axis", [Axis("ms", is_log=True), Axis("s"), Axis("", is_share=True)])
def test_a_scale_places_its_ticks_in_order_on_the_axis(axis: Axis, values: list[float]) -> None:
    scale = scale_of(axis, values)
    places = [scale.at(tick) for tick in scale.ticks]
    assert places == sorted(places) and all(0 <= place <= 1 for place in places)
    assert 0 <= scale.at(-1.0) <= scale.at(1e12) <= 1
