"""Spans over OTLP to a real collector; a collector that fails changes nothing."""

import os
import time
from typing import Any

import pytest

from tandem.runtime.tracing import otel
from tandem.runtime.tracing.otel import traced
from tandem.runtime.tracing.spans import CallSpan, RequestSpan
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.tracing.trace import TraceFile
from tests.runtime.tracing.otlp_collector import Collector
from tests.services import eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.common", reason="the extra otel is missing")

NO_FILE = TraceFile(None, "decode", "d-1")
TRACE_ID = "ab" * 16


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_tracer", None)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def one_request() -> dict[str, str]:
    headers = {"traceparent": f"00-{TRACE_ID}-{'cd' * 8}-01"}
    RequestSpan("decode", headers, Timeline()).end(NO_FILE, "r-1", {"place": "local"})
    return headers


async def test_an_endpoint_is_all_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with traced("decode", "d-1"):
            one_request()
        assert otel.tracer() is None
        (span,) = [each for each in collector.spans if each.name == "tandem.decode"]
        assert span.trace_id.hex() == TRACE_ID and span.parent_span_id.hex() == "cd" * 8
        attributes = {each.key: each.value.string_value for each in span.attributes}
        assert attributes["tandem.place"] == "local" and attributes["tandem.request_id"] == "r-1"
        assert collector.resources[0]["service.name"] == "tandem-decode"
        assert collector.resources[0]["service.instance.id"] == "d-1"


async def test_the_thread_of_the_exporter_makes_the_spans_of_a_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process of the request makes no span of the SDK."""
    from opentelemetry.sdk.trace import Tracer

    monkeypatch.delattr(Tracer, "start_span")
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with traced("decode", "d-1"):
            headers = {"traceparent": f"00-{TRACE_ID}-{'cd' * 8}-01", "tracestate": "a=b"}
            span = RequestSpan("decode", headers, Timeline())
            span.timeline.mark("queued")
            span.begin_handoff()
            span.end_handoff("unclaimed")
            span.timeline.mark("first_token")
            span.end(NO_FILE, "r-1", {"reason": "\ud800", "num": 3, "ms": 0.5})
    found: dict[str, Any] = {each.name: each for each in collector.spans}
    assert found.keys() == {"tandem.decode", "tandem.handoff", "placement", "prefill", "decode"}
    assert {each.trace_id.hex() for each in collector.spans} == {TRACE_ID}
    assert {each.trace_state for each in collector.spans} == {"a=b"}
    decode, handoff = found.pop("tandem.decode"), found["tandem.handoff"]
    assert {each.parent_span_id for each in found.values()} == {decode.span_id}
    assert decode.start_time_unix_nano == found["placement"].start_time_unix_nano
    assert decode.end_time_unix_nano == found["decode"].end_time_unix_nano
    assert found["prefill"].links[0].span_id == handoff.span_id and not found["decode"].links
    assert handoff.status.code == 2 and handoff.status.message == "unclaimed"
    values = {each.key: each.value for each in decode.attributes}
    assert values["tandem.num"].int_value == 3 and values["tandem.ms"].double_value == 0.5
    assert values["tandem.reason"].string_value == "?"


async def test_spans_of_engines_come_with_those_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with traced("worker", "w-1"):
            tracer = otel.tracer()
            assert tracer is not None
            tracer.start("load_kv", one_request()).end()
    found = {each.name: each for each in collector.spans}
    assert found["load_kv"].parent_span_id == found["tandem.decode"].span_id
    assert {each["service.name"] for each in collector.resources} == {"tandem-worker"}


async def test_a_collector_that_restarts_gets_the_batch_by_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.runtime.tracing.otlp_sender._FIRST_PAUSE_S", 0.02)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with Collector(statuses=(503, 429)) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url + "/")
        async with traced("decode", "d-1"):
            one_request()
            await eventually(lambda: bool(collector.spans))
        assert "tandem.decode" in {each.name for each in collector.spans}
        assert collector.num_requests == 3
        assert collector.headers["x-key"] == "a b"
        assert collector.headers["Content-Encoding"] == "gzip"


async def test_a_batch_that_the_collector_refuses_is_lost_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Collector(statuses=(400,)) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url + "/v1/traces")
        async with traced("decode", "d-1"):
            one_request()
        assert collector.num_requests == 1 and not collector.spans
    assert "spans are lost" in caplog.text and "status 400" in caplog.text


async def test_a_sampler_that_heeds_no_parent_decides_of_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    async with traced("frontend", "f-1"):
        for trace_id, flag, is_sampled in (("0" * 31 + "1", 0, True), ("f" * 32, 1, False)):
            headers = {"traceparent": f"00-{trace_id}-{'cd' * 8}-0{flag}"}
            span = RequestSpan("frontend", headers, Timeline())
            assert span.is_wanted(NO_FILE) is is_sampled
            with CallSpan(headers, None, {}) as call:
                assert call.headers["traceparent"].endswith("01" if is_sampled else "00")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENDPOINT", "ftp://127.0.0.1"),
        ("ENDPOINT", "http://a:b@127.0.0.1"),
        ("TIMEOUT", "soon"),
        ("COMPRESSION", "zip"),
    ],
)
async def test_a_setting_of_the_exporter_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    async with traced("decode", "d-1"):
        assert otel.tracer() is None
    assert f"no traces: OTEL_EXPORTER_OTLP_{name}: " in caplog.text


async def test_a_trace_that_is_not_sampled_keeps_its_id_and_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        async with traced("decode", "d-1"):
            headers = one_request()
        assert headers["traceparent"].split("-")[1] == TRACE_ID
        assert headers["traceparent"].endswith("-00")
        assert collector.num_requests == 0


async def test_without_an_endpoint_there_is_no_tracer() -> None:
    async with traced("decode", "d-1"):
        assert otel.tracer() is None


async def test_settings_that_are_wrong_are_logged_and_end_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    async with traced("decode", "d-1"):
        assert otel.tracer() is None
    assert "no traces" in caplog.text


@pytest.mark.slow
async def test_a_collector_that_hangs_holds_up_no_request_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Collector(hangs=True) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with traced("decode", "d-1"):
            for _ in range(5_000):  # more than the queue takes
                one_request()
            leaving_at = time.perf_counter()
        assert collector.num_requests > 0
        assert (
            time.perf_counter() - leaving_at < 4 * otel._FLUSH_S
        )  # without a bound: the 10 s that an export may take
