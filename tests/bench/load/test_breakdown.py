"""The breakdown of a request's time, from its server's timeline."""

import pytest

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import breakdown_ms, prediction_errors, summarize
from tests.bench.load.sse_server import HANDOFF

LOCAL = {"received": 0.0, "first_token": 8.0, "first_step": 11.0}
FALLBACK = {"received": 0.0, "queued": 2.0, "first_token": 90.0, "first_step": 95.0}


def record(
    timeline_ms: dict[str, float],
    ttft_ms: float = 25.0,
    ttst_ms: float = 36.0,
    predicted_ms: float = 0.0,
) -> RequestRecord:
    times = [ttft_ms / 1e3, ttst_ms / 1e3]
    return RequestRecord(
        0, 0.0, 0.0, 0.1, times, num_output_tokens=2, has_usage=True, timeline_ms=timeline_ms,
        predicted_ms=predicted_ms,
    )  # fmt: skip


def medians(timelines: list[dict[str, float]], course: str) -> dict[str, float]:
    found = breakdown_ms(map(record, timelines))
    return {part: spread.p50 for part, spread in found.get(course, {}).items()}


def test_the_parts_of_a_handoff_stand_beside_what_its_client_saw() -> None:
    assert medians([HANDOFF], "remote") == pytest.approx(
        {
            "placement": 2, "queue": 3, "compute": 15, "answer": 1, "exposed_transfer": 5,
            "verification": 0.5, "first_step": 4.5, "ttft": 25, "outside": 4, "ttst": 36,
        }
    )  # fmt: skip


def test_local_requests_are_apart_and_those_taken_back_are_only_counted() -> None:
    timelines = [HANDOFF, LOCAL, FALLBACK]
    assert medians(timelines, "local") == pytest.approx(
        {"prefill": 8, "second_token": 3, "ttft": 25, "outside": 17, "ttst": 36}
    )
    assert medians(timelines, "remote") == medians([HANDOFF], "remote")
    assert summarize([record(each) for each in timelines], {}).num_fallbacks == 1


def test_errors_of_predictions_are_shares_of_the_worker_s_actual_times() -> None:
    """The actual time is 8 ms; without a prediction or a first token there is no error."""
    predicted_ms = (10.0, 8.0, 4.0, 12.0, 12.1, 80.0, 0.0)
    records = [record(LOCAL, predicted_ms=ms) for ms in predicted_ms]
    errors = prediction_errors([*records, record({"received": 0.0}, predicted_ms=9.0)])
    assert errors is not None
    assert errors.num_samples == 6
    assert errors.median == pytest.approx(0.5)  # 0, 0.25, 0.5, 0.5, 0.51, 9
    assert errors.share_within_half == pytest.approx(4 / 6)
