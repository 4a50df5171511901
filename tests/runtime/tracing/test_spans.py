"""Spans of requests: under one trace, with the stages of their timelines, and their links."""

from typing import Any

import pytest

from tandem.runtime.errors import ConnectionLostError
from tandem.runtime.tracing import otel
from tandem.runtime.tracing.span_record import wall_clock_ns
from tandem.runtime.tracing.spans import CallSpan, RequestSpan
from tandem.runtime.tracing.timeline import Stage, Timeline
from tandem.runtime.tracing.trace import TraceFile
from tests.runtime.tracing.timelines import aged

CALLER = "cd" * 8
TRACE_ID = "ab" * 16
NO_FILE = TraceFile(None, "decode", "d-1")


def by_name(exported: Any) -> dict[str, Any]:
    spans = exported.get_finished_spans()
    assert {f"{each.context.trace_id:032x}" for each in spans} == {TRACE_ID}
    return {each.name: each for each in spans}


def test_a_ticket_is_between_the_two_workers_and_times_are_the_timelines(exported: Any) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    stages: dict[Stage, float] = {
        "queued": 2.0, "claimed": 5.0, "computed": 20.0, "landed": 25.0, "verified": 26.0,
    }  # fmt: skip
    decode = RequestSpan("decode", headers, aged(stages))
    ticket = decode.begin_handoff()
    prefill = RequestSpan("prefill", ticket, aged())
    prefill.end(NO_FILE, "ab.1", {"num_tokens": 3}, "deadline")
    decode.end_handoff()
    decode.end(NO_FILE, "r-1", {"place": "remote"}, conventions={"gen_ai.request.model": "m"})
    found = by_name(exported)
    span, handoff, below = found["tandem.decode"], found["tandem.handoff"], found["tandem.prefill"]
    assert span.parent.span_id == int(CALLER, 16)
    assert handoff.parent.span_id == found["queue"].parent.span_id == span.context.span_id
    assert below.parent.span_id == handoff.context.span_id
    assert below.status.status_code.name == "ERROR"
    assert (
        below.attributes["error.type"] == "deadline" and below.attributes["tandem.num_tokens"] == 3
    )
    assert span.attributes["tandem.place"] == "remote"
    assert span.attributes["gen_ai.provider.name"] == "tandem"
    assert span.attributes["gen_ai.request.model"] == "m"
    begin_ns = wall_clock_ns(decode.timeline.started_at)
    for name, begin, end in (("queue", 2.0, 5.0), ("compute", 5.0, 20.0)):
        times_ms = [(at - begin_ns) / 1e6 for at in (found[name].start_time, found[name].end_time)]
        assert times_ms == pytest.approx([begin, end], abs=0.1)


def test_a_fallback_is_linked_to_the_handoff_that_failed(exported: Any) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    decode = RequestSpan("decode", headers, aged({"queued": 2.0, "first_token": 30.0}))
    decode.begin_handoff()
    decode.end_handoff("unclaimed")
    decode.end(NO_FILE, "r-1", {})
    found = by_name(exported)
    (link,) = found["prefill"].links
    assert link.context.span_id == found["tandem.handoff"].context.span_id
    assert found["tandem.handoff"].attributes["error.type"] == "unclaimed"
    assert not found["placement"].links


def test_a_migration_is_a_call_linked_to_the_one_that_failed(exported: Any) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    first = CallSpan(headers, None, {"decode_instance": "a"})
    with pytest.raises(ConnectionLostError), first:
        raise ConnectionLostError("gone")
    with CallSpan(headers, first, {"decode_instance": "b"}) as second:
        assert second.headers["traceparent"] != first.headers["traceparent"]
    lost, resumed = exported.get_finished_spans()
    assert lost.attributes["error.type"] == ConnectionLostError.code and not lost.links
    assert [link.context.span_id for link in resumed.links] == [lost.context.span_id]
    assert lost.parent.span_id == resumed.parent.span_id == int(CALLER, 16)


def test_without_a_tracer_headers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_tracer", None)
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    span = RequestSpan("frontend", headers, Timeline())
    with CallSpan(headers, None, {}) as call:
        assert call.headers is headers is span.begin_handoff()
    assert headers == {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    assert span.traceparent == "" and not span.is_wanted(NO_FILE)
