"""Spans of requests: under one trace, with the stages of their timelines."""

from typing import Any

from tandem.runtime.spans import RequestSpan
from tandem.runtime.timeline import Timeline
from tandem.runtime.trace import parts_of

CALLER = "cd" * 8
TRACE_ID = "ab" * 16


def test_a_prefill_workers_span_is_below_the_decode_workers(exported: Any) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    timeline = Timeline()
    timeline.started_at -= 1.0
    for stage, ms in (("queued", 2.0), ("claimed", 5.0), ("first_token", 20.0)):
        timeline.mark(stage, timeline.started_at + ms / 1e3)
    span = RequestSpan("tandem.decode", headers, timeline.started_at)
    prefill = RequestSpan("tandem.prefill", dict(headers), timeline.started_at)
    prefill.end([], {"num_tokens": 3}, "deadline")
    span.end(parts_of("decode", timeline.ms(), 1e6), {"place": "remote"})
    found = {each.name: each for each in exported.get_finished_spans()}
    decode, below = found["tandem.decode"], found["tandem.prefill"]
    assert {f"{each.context.trace_id:032x}" for each in found.values()} == {TRACE_ID}
    assert decode.parent.span_id == int(CALLER, 16)
    assert below.parent.span_id == found["queue"].parent.span_id == decode.context.span_id
    assert below.status.status_code.name == "ERROR" and below.attributes["num_tokens"] == 3
    lasted_ms = {n: (each.end_time - each.start_time) / 1e6 for n, each in found.items()}
    assert abs(lasted_ms["queue"] - 3.0) < 0.1 and abs(lasted_ms["prefill"] - 15.0) < 0.1
    assert decode.start_time <= found["placement"].start_time
    assert decode.attributes["place"] == "remote"
