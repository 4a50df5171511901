"""Spans over OTLP to a real collector; a collector that fails changes nothing."""

import time

import pytest

from tandem.runtime import otel
from tandem.runtime.otel import traced
from tandem.runtime.spans import RequestSpan
from tandem.runtime.timeline import Timeline
from tandem.runtime.trace import TraceFile
from tests.runtime.otlp_collector import Collector

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")

NO_FILE = TraceFile(None, "decode", "d-1")
TRACE_ID = "ab" * 16


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_tracer", None)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


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
        assert time.perf_counter() - leaving_at < 2 * otel._FLUSH_S
