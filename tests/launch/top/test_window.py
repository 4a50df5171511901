"""The last minute of counts that only grow."""

import math

import pytest

from tandem.launch.top.collect import frontend_counts, worker_counts
from tandem.launch.top.window import Counts, Window, of_kind, quantile_ms
from tests.launch.top.readings import metrics, worker

KEY = ("prompts", "remote", "long")


def count(value: float) -> Counts:
    return {KEY: value}


def test_only_the_last_minute_counts() -> None:
    window = Window()
    for second in range(0, 200, 10):
        window.add(float(second), {"a": count(second)})
    assert window.grown()[KEY] == 60 and window.covered_s == 60


def test_a_process_that_starts_anew_or_misses_a_reading_takes_nothing_away() -> None:
    window = Window()
    window.add(0.0, {"a/1": count(100), "b/1": count(5)})
    window.add(2.0, {"a/1": count(110)})
    window.add(4.0, {"a/2": count(0), "b/1": count(8)})
    window.add(6.0, {"a/2": count(4)})
    assert window.grown()[KEY] == 10 + 4 + 3


def test_a_cause_that_comes_up_later_counts_from_zero() -> None:
    window = Window()
    window.add(0.0, {"a": {}})
    window.add(2.0, {"a": count(3)})
    assert dict(of_kind(window.grown(), "prompts")) == {("remote", "long"): 3}


def test_an_empty_window_has_no_counts() -> None:
    assert Window().grown() == {} and Window().covered_s == 0


@pytest.mark.parametrize(
    ("buckets", "share", "ms"),
    [
        ({0.1: 0, 0.2: 10, math.inf: 10}, 0.5, 150.0),
        ({0.1: 5, 0.2: 10, math.inf: 10}, 0.5, 100.0),
        ({0.1: 5, 0.2: 5, 0.5: 5, math.inf: 10}, 0.95, 500.0),
        ({0.1: 10, math.inf: 10}, 0.1, 10.0),
    ],
)
def test_a_quantile_lies_on_a_line_through_its_bucket(
    buckets: dict[float, float], share: float, ms: float
) -> None:
    assert quantile_ms(buckets, share) == pytest.approx(ms)


def test_no_values_have_no_quantile() -> None:
    assert quantile_ms({}, 0.5) is None and quantile_ms({0.1: 0, math.inf: 0}, 0.5) is None


def test_the_metrics_of_a_real_frontend_are_read() -> None:
    found = dict(frontend_counts(metrics(0.15, 4)))
    assert found["ttft", "m", "0.1"] == 0 and found["ttft", "m", "0.2"] == 4
    assert found["itl", "m", "+Inf"] == 4
    assert {kind for kind, *_ in found} == {"ttft", "itl"}


def test_prompts_by_place_and_cause_are_in_the_status_of_a_worker() -> None:
    report = worker("w", **{"prompts.remote.long": 3, "num_jobs": 2, "prompts.x": 9})
    assert worker_counts(report) == {KEY: 3}
    assert worker_counts(worker("w", answers=False)) == {}
