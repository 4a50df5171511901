import msgspec
import pytest

from tandem.bench.report.figures import (
    Bound,
    Figure,
    Target,
    at_least,
    at_most,
    in_unit,
    measured,
    percentile,
    ratio,
)


def test_percentiles_interpolate_between_the_nearest_ranks() -> None:
    values = [50.0, 10.0, 30.0, 20.0, 40.0]
    assert percentile(values, 0) == 10
    assert percentile(values, 0.5) == 30
    assert percentile(values, 0.9) == pytest.approx(46)
    assert percentile(values, 1) == 50
    assert percentile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("value", "target", "verdict"),
    [
        (5.0, at_most(5.0), "met"),
        (5.1, at_most(5.0), "missed"),
        (4.0, at_most(5.0, 4.0), "stretch"),
        (600.0, at_least(600.0, 660.0), "met"),
        (660.0, at_least(600.0, 660.0), "stretch"),
        (599.0, at_least(600.0), "missed"),
        (5.0, None, ""),
    ],
)
def test_a_figure_is_judged_by_its_value_at_the_limit(
    value: float, target: Target | None, verdict: str
) -> None:
    assert Figure("a", "a", "us", (value,), target).verdict == verdict


def test_the_median_of_the_rounds_decides() -> None:
    (figure,) = measured(
        [Figure("a", "a", "ms", target=at_most(5.0))], [{"a": 9.0}, {"a": 5.0}, {"a": 1.0}]
    )
    assert (figure.samples, figure.value, figure.verdict) == ((9.0, 5.0, 1.0), 5.0, "met")


def test_a_figure_without_samples_is_open_and_a_failed_one_is_failed() -> None:
    assert Figure("a", "a", "ms", target=at_most(1.0)).verdict == "open"
    assert Figure("a", "a", "ms", (0.5,), at_most(1.0), failure="wrong").verdict == "failed"


def test_a_target_that_lies_in_the_interval_is_missed_within_noise() -> None:
    figure = Figure("a", "a", "x", (0.9,), at_least(0.95), interval=(0.88, 0.96))
    assert figure.verdict == "within noise"
    outside = msgspec.structs.replace(figure, interval=(0.88, 0.92))
    assert outside.verdict == "missed"


def test_a_time_is_held_against_the_floor_of_its_work_and_a_rate_against_the_ceiling() -> None:
    rates = {"read": 4e12, "matmul": 800e12}
    time = Figure("t", "t", "us", (1100.0,), at_least(0.85, of="share"), bound=Bound("read", 4e9))
    found = time.with_ceiling(rates)
    assert (found.ceiling, found.verdict) == (1000.0, "met")
    assert found.share == pytest.approx(1 / 1.1)
    assert time.with_ceiling({}).verdict == "open"
    rate = Figure("r", "r", "TFLOP/s", (400.0,), bound=Bound("matmul")).with_ceiling(rates)
    assert (rate.ceiling, rate.share) == (800.0, 0.5)
    payload = Figure("p", "p", "TB/s", (1.0,), bound=Bound("read", 2.0)).with_ceiling(rates)
    assert payload.ceiling == 2.0


def test_seconds_become_times_and_rates() -> None:
    assert in_unit([2e-3], "us") == (2000.0,)
    assert in_unit([2.0], "TB/s", work=4e12) == (2.0,)


def test_a_ratio_is_taken_within_each_round_and_lies_in_its_interval() -> None:
    figure = ratio("r", "r", [[2.0, 2.2], [3.0]], [[1.0, 1.1], [2.0]], at_most(9.0))
    assert figure.samples == pytest.approx((2.0, 1.5))
    assert figure.interval is not None
    assert figure.interval[0] <= 2.0 <= figure.interval[1]


def test_the_json_has_what_the_samples_imply() -> None:
    values = Figure("a", "a", "ms", (1.0, 3.0), at_most(5.0), ceiling=1.0).to_json()
    assert (values["value"], values["share"], values["verdict"]) == (2.0, 0.5, "met")
    assert values["target"]["limit"] == 5.0
