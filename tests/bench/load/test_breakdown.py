"""Where the time of requests went, from what a server tells of them."""

import io

import pytest
from rich.console import Console

from tandem.bench.load.breakdown import Breakdown, breakdown_tables
from tandem.bench.load.metrics import RequestRecord, breakdown_ms, summarize
from tests.bench.load.sse_server import HANDOFF

LOCAL = {"received": 0.0, "first_token": 8.0, "first_step": 11.0}
FALLBACK = {"received": 0.0, "queued": 2.0, "first_token": 90.0, "first_step": 95.0}


def record(
    timeline_ms: dict[str, float], ttft_ms: float = 25.0, ttst_ms: float = 36.0
) -> RequestRecord:
    times = [ttft_ms / 1e3, ttst_ms / 1e3]
    return RequestRecord(
        0, 0.0, 0.0, 0.1, times, num_output_tokens=2, has_usage=True, timeline_ms=timeline_ms
    )


def shown(sides: dict[str, Breakdown]) -> str:
    written = io.StringIO()
    for table in breakdown_tables(sides):
        Console(file=written, width=120).print(table)
    return written.getvalue()


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


def test_a_server_that_tells_nothing_has_no_breakdown() -> None:
    summary = summarize([record({})], {})
    assert (summary.breakdown_ms, summary.num_fallbacks) == ({}, 0)
    assert breakdown_tables({"": summary.breakdown_ms}) == []


def test_stages_that_a_newer_server_may_add_are_passed_over() -> None:
    assert medians([HANDOFF | {"thawed": 3.0}], "remote") == medians([HANDOFF], "remote")


def test_failed_requests_enter_no_breakdown() -> None:
    failed = record(HANDOFF)
    failed.error = "timeout"
    assert summarize([failed], {}).breakdown_ms == {}


def test_the_table_has_the_median_and_the_p99_of_every_part() -> None:
    slow = HANDOFF | {"landed": 35.0, "verified": 35.5, "first_step": 40.0}
    text = shown({"": breakdown_ms([record(HANDOFF), record(slow), record(LOCAL)])})
    assert "prefilled remotely (2 requests)" in text
    assert "prefilled locally (1 requests)" in text
    (row,) = [line for line in text.splitlines() if "exposed transfer" in line]
    assert "10.00" in row and "14.90" in row
    assert "prefix pulled" not in text


def test_two_sides_stand_beside_each_other_even_if_one_has_none() -> None:
    text = shown({"A": breakdown_ms([record(LOCAL)]), "B": breakdown_ms([record(HANDOFF)])})
    assert "prefilled remotely (A 0, B 1 requests)" in text
    for heading in ("A p50", "A p99", "B p50", "B p99"):
        assert heading in text
    (row,) = [line for line in text.splitlines() if "verification" in line]
    assert row.count("-") == 2 and row.count("0.500") == 2
