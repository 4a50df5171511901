"""The charts of measured runs, and their PNG."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from tandem.bench.load.runs import Side
from tandem.bench.picture.charts import charts_of, frontier, plot_charts, tokens_over_time
from tandem.bench.picture.drawing import drawn, write_plot
from tests.bench.picture.runs import answered, run, side


def curves(axes: Axes) -> dict[str, "np.ndarray"]:
    """Return the points of each line by its label."""
    return {str(line.get_label()): line.get_xydata() for line in axes.get_lines()}


def test_one_long_gap_leaves_the_usual_ones_to_be_seen(tmp_path: Path) -> None:
    sides = [Side("bench", [run([answered(0.1, 0.1, 0.11, 0.12, 5.0)])])]
    _, itl, _ = drawn(plot_charts(sides)).axes
    low, high = itl.get_xlim()
    usual_ms = itl.transAxes.inverted().transform(itl.transData.transform((10.0, 0)))[0]
    assert 0 < low <= 0.1 and high >= 4880
    assert 0.2 < usual_ms < 0.8
    write_plot(tmp_path / "run.png", sides)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_answers_is_drawn_empty(tmp_path: Path) -> None:
    write_plot(tmp_path / "run.png", [Side("bench", [run([])])])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_distribution_reaches_from_its_least_to_its_most() -> None:
    requests = [answered(value / 1e3) for value in range(1, 10_001)]
    ttft, *_ = drawn(plot_charts([Side("bench", [run(requests)])])).axes
    points = curves(ttft)["bench"]
    assert points[0] == pytest.approx((1.0, 0.0)) and points[-1] == pytest.approx((10_000.0, 1.0))
    assert len(points) < 1000


def test_no_token_is_lost_over_time() -> None:
    rates, edges = tokens_over_time([answered(0.5, 1.0, 2.0), answered(0.7, 0.8)], num_bins=3)
    assert edges.tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert sum(rates * 0.5) == pytest.approx(5)


def test_the_frontier_has_no_point_that_another_beats_in_both_values() -> None:
    assert frontier([(1, 9), (2, 8), (2, 5), (3, 8), (5, 1), (4, 0)]) == [(1, 9), (3, 8), (5, 1)]


def test_each_sweep_is_one_curve_of_goodput_and_one_frontier() -> None:
    sides = [
        side("old: 4 requests/s", 0.1, 4.0, "old"),
        side("old: 8 requests/s", 0.3, 8.0, "old"),
        side("4 requests/s", 0.1, 4.0, ""),
        side("8 requests/s", 0.1, 8.0, ""),
    ]
    axes = {chart.title: drawn([chart]).axes[0] for chart in charts_of(sides)}
    found = curves(axes["Goodput against rate"])
    assert found["within all limits (goodput)"][:, 0].tolist() == [4.0, 8.0]
    assert (found["old: within all limits (goodput)"][:, 1] > 0).tolist() == [True, False]
    assert found["offered"].tolist() == [[4.0, 4.0], [8.0, 8.0]]
    speeds = curves(axes["Throughput against the speed of one answer"])
    assert {"frontier", "old: frontier"} <= speeds.keys()


def test_two_runs_at_different_rates_are_no_sweep() -> None:
    titles = [chart.title for chart in charts_of([side("a", 0.1, 4.0), side("b", 0.1, 8.0)])]
    assert "Time to first token" in titles and "Goodput against rate" not in titles
