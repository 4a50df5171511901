"""The OTLP exporter of a process; imported only where the environment names a collector."""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tandem.runtime.tracing.ended_span import EndedSpan
from tandem.runtime.tracing.otel_tracer import Whole
from tandem.runtime.tracing.otlp_sender import OtlpSender
from tandem.runtime.tracing.span_record import Value

logger = logging.getLogger(__name__)

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NUM_KEPT_ATTRIBUTES = 1024
_NUM_AT_ONCE = 16  # requests, before the event loop may have the interpreter
_SCOPE = InstrumentationScope(name="tandem")


def new_provider(component: str, instance_id: str) -> TracerProvider:
    """Return a provider that sends spans from a thread, out of a bounded queue.

    The variables of OpenTelemetry say where to, which part of the traces, and under which names.
    """
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        logger.warning("traces are sent by http/protobuf; %s is not supported", protocol)
    ours = {"service.name": f"tandem-{component}", "service.instance.id": instance_id}
    given = OTELResourceDetector().detect().attributes
    resource = Resource.create({name: ours[name] for name in ours if name not in given})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(Queue(resource, OtlpSender.of_environment()))
    return provider


class Queue(BatchSpanProcessor):
    """The spans that wait for the exporter's thread. At the end they get a single try."""

    def __init__(self, resource: Resource, sender: OtlpSender) -> None:
        super().__init__(Exporter(resource, sender))
        self._sender = sender

    def shutdown(self) -> None:
        """Send the last batches."""
        self._sender.close()
        super().shutdown()  # type: ignore[no-untyped-call]


class Exporter(SpanExporter):
    """Makes messages of ended requests, and of the spans of engines, in the thread of the queue."""

    def __init__(self, resource: Resource, sender: OtlpSender) -> None:
        self._resource = ResourceMessage(attributes=_attributes(resource.attributes))
        self._sender = sender

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; one that fails is lost."""
        request = ExportTraceServiceRequest()
        ours = request.resource_spans.add(resource=self._resource)
        scope = ours.scope_spans.add(scope=_SCOPE)
        theirs = []
        for index, each in enumerate(spans, 1):
            if not isinstance(each, Whole):
                theirs.append(each)
                continue
            for span in each.ended.spans():
                _add(scope.spans, span)
            if index % _NUM_AT_ONCE == 0:
                time.sleep(0)
        body = request.SerializeToString() if scope.spans else b""
        if theirs:
            body += encode_spans(theirs).SerializeToString()  # one after the other is both
        return SpanExportResult.SUCCESS if self._sender.send(body) else SpanExportResult.FAILURE


def _add(spans: Any, span: EndedSpan) -> None:
    ids = span.ids
    message = spans.add(
        trace_id=bytes.fromhex(ids.trace_id),
        span_id=bytes.fromhex(ids.span_id),
        parent_span_id=bytes.fromhex(ids.parent_id),
        name=span.name,
        kind=span.kind,
        start_time_unix_nano=span.begin_ns,
        end_time_unix_nano=span.end_ns,
    )
    if span.attributes:
        message.attributes.extend(_attributes(span.attributes))
    if ids.trace_state:
        message.trace_state = ids.trace_state
    for name, at_ns in span.events:
        message.events.add(name=name, time_unix_nano=at_ns)
    if (link := span.link) is not None:
        trace_id, span_id = bytes.fromhex(link.trace_id), bytes.fromhex(link.span_id)
        message.links.add(trace_id=trace_id, span_id=span_id)
    if span.error:
        message.status.code, message.status.message = Status.STATUS_CODE_ERROR, span.error
        message.attributes.append(_attribute("error.type", span.error))


def _attributes(attributes: Mapping[str, object]) -> Iterable[KeyValue]:
    return [_attribute(key, value) for key, value in attributes.items()]


@lru_cache(_NUM_KEPT_ATTRIBUTES, typed=True)
def _attribute(key: str, value: Value) -> KeyValue:
    """Return an attribute; most values come again and again."""
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    if isinstance(value, float):
        return KeyValue(key=key, value=AnyValue(double_value=value))
    text = str(value).encode(errors="replace").decode()  # headers may have lone surrogates
    return KeyValue(key=key, value=AnyValue(string_value=text))
