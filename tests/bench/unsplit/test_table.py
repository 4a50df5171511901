from collections import Counter

import pytest

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.load import LoadResult
from tandem.bench.load.metrics import summarize
from tandem.bench.load.session import Run
from tandem.bench.unsplit.table import METRICS, Values, figures_of, markdown, values_of


def values(rate: float, ms: float, num_failed: int = 0) -> Values:
    return {metric.name: rate if metric.is_rate else ms for metric in METRICS} | {
        "num_failed": num_failed,
        "remote_share": 0.25,
    }


def a_run(*ends_s: float) -> Run:
    records = [
        RequestRecord(at, 0.0, 0.0, end_s, [0.5, end_s], num_output_tokens=3, has_usage=True)
        for at, end_s in enumerate(ends_s)
    ]
    return Run(LoadResult(records), summarize(records, {}))


def test_every_metric_of_a_run_is_found_and_goodputs_have_targets_of_their_own() -> None:
    run = a_run(1.5, 2.5)
    targets = {"tight": {"tpot": 600.0}, "loose": {"tpot": 1200.0}}
    found = values_of(run, targets)
    assert {metric.name for metric in METRICS} <= found.keys()
    assert (found["goodput tight"], found["goodput loose"]) == (1 / 2.5, 2 / 2.5)
    assert found["num_failed"] == 0
    run.result.records[0].error = "timeout"
    run.result.records[1].num_asked_tokens = 4
    failed = Run(run.result, summarize(run.result.records, {}))
    assert values_of(failed, targets)["num_failed"] == 2


def test_above_one_is_better_of_rates_and_of_times() -> None:
    results = {"c1": {"unsplit": [values(2.0, 100.0)], "split": [values(4.0, 50.0)]}}
    figures = list(figures_of(results))
    assert len(figures) == len(METRICS)
    assert {figure.value for figure in figures} == {2.0}


def test_a_figure_is_the_median_of_the_rounds_own_ratios() -> None:
    unsplit = [values(1.0, 10.0), values(10.0, 10.0), values(100.0, 10.0)]
    split = [values(0.9, 10.0), values(20.0, 10.0), values(50.0, 10.0)]
    figures = {f.name: f for f in figures_of({"c1": {"unsplit": unsplit, "split": split}})}
    rates = figures["c1/split/request_throughput"]
    assert rates.samples == pytest.approx((0.9, 2.0, 0.5))
    assert (rates.value, rates.verdict) == (pytest.approx(0.9), "missed")
    assert figures["c1/split/ttft p50"].verdict == "met"
    table = markdown({"c1": {"unsplit": unsplit, "split": split}}, {})
    assert "| c1 | 10.00 | - | 0.90 (0.50 to 2.00) | 1.00 (1.00 to 1.00) |" in table
    assert "3 of 4 medians" in table
    assert "| geometric mean, standard error | | | 0.97 ± 0.39 | 1.00 ± 0.00 |" in table
    assert "| 25% |" in table and "Places" not in table


def test_what_was_not_measured_or_is_nothing_has_no_ratio() -> None:
    idle = values(2.0, 10.0) | {"goodput tight": 0.0}
    del idle["itl p99"]
    results = {
        "c1": {"unsplit": [idle], "split": [values(2.0, 10.0), values(9.0, 10.0)]},
        "c2": {"unsplit": [values(2.0, 10.0)]},
        "c3": {"split": [values(2.0, 10.0)]},
    }
    names = {figure.name for figure in figures_of(results)}
    assert "c1/split/request_throughput" in names
    assert not names & {"c1/split/itl p99", "c1/split/goodput tight"}
    assert not any(name.startswith(("c2", "c3")) for name in names)
    table = markdown(results, {})
    assert "| 1.00 (1.00 to 1.00) | - | - | 1.00 (1.00 to 1.00) |" in table
    assert "| c3 | - | - |" in table and "| c2 |" not in table


def test_a_contender_is_held_against_the_unsplit_workers_with_the_better_median() -> None:
    results = {
        "c1": {
            "unsplit": [values(4.0, 40.0), values(2.0, 90.0), values(2.0, 90.0)],
            "unsplit-round-robin": [values(3.0, 80.0), values(3.0, 80.0), values(1.0, 100.0)],
            "split": [values(3.0, 80.0)] * 3,
        }
    }
    figures = {figure.name: figure for figure in figures_of(results)}
    rates, times = figures["c1/split/request_throughput"], figures["c1/split/ttft p50"]
    assert rates.samples == (1.0, 1.0, 3.0) and rates.label.endswith("unsplit-round-robin")
    assert times.samples == (1.0, 1.0, 1.25)
    in_turn = figures["c1/unsplit-round-robin/request_throughput"]
    assert in_turn.samples == (0.75, 1.5, 0.5) and in_turn.target is None
    table = markdown(results, {})
    assert "**split** against the better unsplit:" in table
    assert "| c1 | 2.00 | 3.00 | 1.00 (1.00 to 3.00) |" in table
    assert "**unsplit-round-robin** against unsplit:" in table


def test_failed_requests_are_told_beside_the_table() -> None:
    fine, bad = values(2.0, 10.0), values(2.0, 10.0, num_failed=3)
    both = {"c1": {"unsplit": [fine, fine], "split": [bad, bad]}}
    assert "Failed or short answers: c1, split: 6." in markdown(both, {})
    assert "Failed" not in markdown({"c1": {"unsplit": [fine], "split": [fine]}}, {})


def test_the_share_and_the_three_commonest_reasons_of_remote_prompts_are_told() -> None:
    fine = values(1.0, 10.0)
    split = [fine | {"remote_share": share} for share in (0.0, 0.5, 0.75)]
    reasons = {"split": Counter({"local: short": 9, "remote: long": 7, "local: a": 3, "b": 1})}
    table = markdown({"c1": {"unsplit": [fine] * 3, "split": split}}, reasons)
    assert "| 50% |" in table
    assert "9 x local: short; 7 x remote: long; 3 x local: a." in table


def test_rounds_whose_emulated_steps_were_late_are_counted_and_not_judged() -> None:
    late = values(9.0, 1.0) | {"late_share": 0.06}
    kept = values(4.0, 50.0) | {"late_share": 0.04}
    unsplit = [values(2.0, 100.0), values(2.0, 100.0)]
    results = {"c1": {"unsplit": unsplit, "split": [late, kept]}}
    assert all(figure.samples == (2.0,) for figure in figures_of(results))
    assert "later than 5%, not judged: 1." in markdown(results, {})
