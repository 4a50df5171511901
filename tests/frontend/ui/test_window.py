"""Quantiles from buckets, and the window of the last minutes."""

import random
from collections import Counter

import pytest

from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.ui.recent import Recent
from tandem.frontend.ui.window import SLOT_S, Window, quantile_ms
from tandem.runtime.wire.messages import PrefillReport


@pytest.fixture
def metrics() -> FrontendMetrics:
    return FrontendMetrics()


def test_a_quantile_is_within_an_eighth_of_the_sorted_values(metrics: FrontendMetrics) -> None:
    draw = random.Random(3)
    histogram = metrics.inter_token_latency
    values = sorted(draw.lognormvariate(-4, 1) for _ in range(5000))
    for value in values:
        histogram.labels("m").observe(value)
    for share in (0.1, 0.5, 0.95, 0.99):
        found = quantile_ms(histogram.fine_bounds, histogram.counts()["m"], share)
        assert found == pytest.approx(values[int(share * 5000)] * 1e3, rel=0.125)


def test_no_value_has_no_quantile_and_a_huge_one_counts_as_the_last_bound(
    metrics: FrontendMetrics,
) -> None:
    histogram = metrics.time_to_first_token
    assert quantile_ms(histogram.fine_bounds, [0] * 170, 0.5) is None
    histogram.labels("m").observe(1e9)
    assert quantile_ms(histogram.fine_bounds, histogram.counts()["m"], 0.5) == 500_000


def test_prometheus_gets_the_coarse_buckets_with_all_values(metrics: FrontendMetrics) -> None:
    for value in (0.00005, 0.0001, 0.0012, 0.0019, 0.002, 0.0021, 1000.0):
        metrics.inter_token_latency.labels("m").observe(value)
    text = metrics.render().decode()
    name = "tandem_frontend_inter_token_latency_seconds"
    lines = [line for line in text.splitlines() if line.startswith(f"{name}_bucket")]
    assert len(lines) == 22
    for bound, count in (("0.0001", 2), ("0.001", 2), ("0.002", 5), ("0.005", 6), ("+Inf", 7)):
        assert f'{name}_bucket{{le="{bound}",model="m"}} {count}.0' in lines
    assert f'{name}_count{{model="m"}} 7.0' in text


def test_the_window_counts_from_its_first_sample_and_drops_the_oldest(
    metrics: FrontendMetrics,
) -> None:
    recent = Recent()
    recent.is_open = True
    window = Window(metrics, recent)
    metrics.time_to_first_token.labels("m").observe(9.0)  # before the page was opened
    assert window.update(0.0) == 0.0
    metrics.time_to_first_token.labels("m").observe(0.1)
    recent.began("d", PrefillReport("local", "uncached 3 <= 9", cause="short"))
    (ttft,) = window.latencies({"m": {"ttft": 50.0}})
    assert (ttft.num, ttft.target_ms, ttft.kind) == (1, 50.0, "ttft")
    assert ttft.p95_ms == pytest.approx(100, rel=0.125)
    assert [each.num for each in window.placements()] == [1]
    for slot in range(1, 100):
        covered_s = window.update(slot * SLOT_S)
    assert covered_s == 59 * SLOT_S
    (ttft,) = window.latencies({})
    assert (ttft.num, ttft.p95_ms, len(ttft.p95s_ms)) == (0, None, 60)
    assert not window.placements()


def test_notes_are_taken_while_a_page_is_open_and_are_bounded() -> None:
    recent = Recent()
    report = PrefillReport("remote", "why", prefill_instance="p", cause="long")
    recent.began("d", report)
    recent.ended("d", report, {"received": 0.0, "queued": 1.0})
    assert recent.causes == Counter() and not recent.begun and not recent.handoffs
    recent.is_open = True
    for number in range(1000):
        recent.began("d", PrefillReport("remote", "why", cause=f"invented {number}"))
        recent.ended("d", report, {"received": 0.0, "queued": 1.0})
    recent.ended("d", report, {"received": 0.0, "first_token": 1.0})  # it stayed local
    assert len(recent.causes) <= 33 and recent.causes["remote", "other"] == 968
    assert len(recent.begun) == len(recent.handoffs) == 8
