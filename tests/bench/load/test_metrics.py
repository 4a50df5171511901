import pytest

from tandem.bench.load.metrics import RequestRecord, distribution, meets, parse_slos, summarize
from tandem.runtime.errors import ConfigError


def record(
    scheduled_s: float = 0.0,
    sent_s: float = 0.0,
    outputs_s: tuple[float, ...] = (),
    end_s: float = 0.0,
    **fields: object,
) -> RequestRecord:
    made = RequestRecord(0, scheduled_s, sent_s, end_s, list(outputs_s), has_usage=True)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_distribution_ignores_the_values_that_do_not_exist() -> None:
    spread = distribution([3.0, None, 1.0])
    assert spread is not None
    assert (spread.num_samples, spread.mean, spread.p50, spread.max) == (2, 2.0, 2.0, 3.0)
    assert distribution([None]) is None


def test_latencies_of_one_request_follow_their_definitions() -> None:
    one = record(1.0, 1.5, (2.0, 2.5, 4.0), 4.0, num_output_tokens=5)
    assert one.ttft_s == 1.0
    assert one.ttft_from_sent_s == 0.5
    assert one.ttst_s == 1.5
    assert one.gaps_s() == [0.5, 1.5]
    assert one.e2el_s == 3.0
    assert one.tpot_s == 0.5  # (3.0 - 1.0) / (5 - 1)


def test_a_request_without_output_events_has_only_an_end_to_end_latency() -> None:
    one = record(0.0, 0.0, (), 2.0, num_output_tokens=4)
    assert (one.ttft_s, one.ttst_s, one.tpot_s, one.gaps_s()) == (None, None, None, [])
    assert one.e2el_s == 2.0


def test_a_second_token_that_came_with_the_first_has_its_time_and_a_single_one_has_none() -> None:
    assert record(1.0, 1.0, (1.5,), 2.0, num_output_tokens=3).ttst_s == 0.5
    single = record(1.0, 1.0, (1.5,), 2.0, num_output_tokens=1)
    assert (single.ttst_s, single.tpot_s) == (None, None)


def test_a_summary_counts_rates_over_the_whole_duration() -> None:
    records = [
        record(0.0, 0.0, (0.5, 1.0), 1.0, num_input_tokens=10, num_output_tokens=2),
        record(1.0, 1.0, (2.0, 3.0), 4.0, num_input_tokens=30, num_output_tokens=6),
    ]
    summary = summarize(records, {})
    assert summary.duration_s == 4.0
    assert summary.request_throughput == 0.5
    assert summary.input_token_throughput == 10.0
    assert summary.output_token_throughput == 2.0
    assert summary.tokens_per_output_event == 2.0
    assert summary.goodput is None
    assert summary.latencies_ms["ttft"].mean == 750.0
    assert summary.latencies_ms["itl"].num_samples == 2
    assert summary.latencies_ms["itl"].max == 1000.0


def test_failures_are_counted_by_kind_and_enter_no_latency() -> None:
    records = [
        record(0.0, 0.0, (1.0,), 1.0, num_output_tokens=1),
        record(0.0, 0.0, (9.0,), 9.0, error="http_503 overloaded"),
        record(0.0, 0.0, (), 2.0, error="connect"),
        record(0.0, 0.0, (), 3.0, error="connect"),
        record(0.0, 0.0, (5.0,), 0.0, unfinished=True),
    ]
    summary = summarize(records, {"ttft": 2000.0})
    assert summary.errors == {"connect": 2, "http_503 overloaded": 1}
    assert (summary.num_requests, summary.num_succeeded, summary.num_unfinished) == (5, 1, 1)
    assert summary.latencies_ms["ttft"].max == 1000.0
    assert summary.duration_s == 9.0
    assert summary.goodput_share == 0.25  # of the four that finished


def test_goodput_needs_every_limit_to_hold() -> None:
    quick = record(0.0, 0.0, (0.1, 0.2), 0.2, num_output_tokens=2)
    slow_end = record(0.0, 0.0, (0.1, 0.9), 0.9, num_output_tokens=2)
    late = record(0.0, 0.0, (0.5, 0.6), 0.6, num_output_tokens=2)
    slos = {"ttft": 200.0, "tpot": 150.0}
    assert [meets(one, slos) for one in (quick, slow_end, late)] == [True, False, False]
    summary = summarize([quick, slow_end, late], slos)
    assert summary.goodput == pytest.approx(1 / 0.9)


def test_time_to_first_token_is_split_by_the_place_of_prefill() -> None:
    records = [
        record(0.0, 0.0, (0.1,), 0.1, num_output_tokens=1, prefill_place="local"),
        record(0.0, 0.0, (0.3,), 0.3, num_output_tokens=1, prefill_place="remote"),
        record(0.0, 0.0, (0.5,), 0.5, num_output_tokens=1, prefill_place="remote"),
    ]
    records[1].prefill_reason = "uncached 412 > max_local_prefill_length 200"
    records[2].prefill_reason = "uncached 413 > max_local_prefill_length 200"
    summary = summarize(records, {})
    assert summary.prefill_places == {"local": 1, "remote": 2}
    assert summary.prefill_reasons == {"remote: uncached N > max_local_prefill_length N": 2}
    assert summary.latencies_ms["ttft_local"].p50 == pytest.approx(100)
    assert summary.latencies_ms["ttft_remote"].p50 == pytest.approx(400)


def test_short_answers_and_missing_usage_are_counted() -> None:
    records = [
        record(end_s=1.0, num_output_tokens=3, num_asked_tokens=4),
        record(end_s=1.0, num_output_tokens=4, num_asked_tokens=4, has_usage=False),
        record(end_s=1.0, num_output_tokens=2),
    ]
    summary = summarize(records, {})
    assert (summary.num_short_answers, summary.num_without_usage) == (1, 1)


def test_a_summary_of_nothing_is_all_zero() -> None:
    summary = summarize([], {"ttft": 1.0})
    assert (summary.num_requests, summary.request_throughput, summary.goodput) == (0, 0.0, 0.0)
    assert summary.latencies_ms == {}


def test_limits_are_read_in_any_grouping() -> None:
    assert parse_slos(["ttft:200", "tpot:50,e2el:900"]) == parse_slos(["ttft:200 tpot:50 e2el:900"])
    assert parse_slos([]) == {}


@pytest.mark.parametrize("word", ["ttft", "itl:5", "ttft:fast", "ttft:0", "ttft:-3", "ttft:nan"])
def test_a_bad_limit_is_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_slos([word])
