import pytest

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import Summary, summarize
from tandem.bench.load.sides import Row, compare_rounds


def one_request(ttft_s: float, end_s: float) -> Summary:
    record = RequestRecord(0, 0.0, 0.0, end_s, [ttft_s], num_output_tokens=2, has_usage=True)
    return summarize([record], {})


def row(rows: list[Row], metric: str) -> Row:
    return next(row for row in rows if row.metric == metric)


def test_the_ratio_is_that_of_the_medians_and_each_round_has_its_own() -> None:
    rows = compare_rounds(
        [one_request(0.1, 1.0), one_request(0.2, 1.0), one_request(0.4, 1.0)],
        [one_request(0.2, 2.0), one_request(0.3, 2.0), one_request(0.4, 2.0)],
    )
    ttft = row(rows, "ttft p50")
    assert ttft.ratio == pytest.approx(1.5)  # 300 ms over 200 ms
    assert ttft.ratios == pytest.approx((2.0, 1.5, 1.0))
    assert row(rows, "request_throughput").ratio == pytest.approx(0.5)
    assert row(rows, "output_token_throughput").a == pytest.approx((2.0, 2.0, 2.0))


def test_an_unfinished_round_of_one_side_is_left_out_of_both() -> None:
    rows = compare_rounds([one_request(0.1, 1.0), one_request(9.0, 9.5)], [one_request(0.3, 1.0)])
    assert row(rows, "ttft p50").a == pytest.approx((100.0,))
    assert row(rows, "ttft p50").b == pytest.approx((300.0,))


def test_a_ratio_to_zero_does_not_exist() -> None:
    assert Row("itl p50", (0.0, 0.0), (1.0, 2.0)).ratio is None
    assert Row("itl p50", (0.0, 2.0), (1.0, 2.0)).ratios == (None, 1.0)
