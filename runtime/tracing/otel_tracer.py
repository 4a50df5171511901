"""OpenTelemetry's SDK, behind a few calls; imported only where something takes spans."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.sampling import Decision, ParentBased
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.runtime.tracing.ended_span import EndedRequest, EndedSpan, Kind
from tandem.runtime.tracing.span_ids import SAMPLED, SpanIds


class Whole(ReadableSpan):
    """A request or span in the queue of an exporter that makes spans of it."""

    _SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, ended: EndedRequest | EndedSpan) -> None:
        self.ended = ended

    @property
    def context(self) -> SpanContext:
        """A context that the queue takes."""
        return self._SAMPLED


class Tracer:
    """Spans whose parents are named by W3C headers, whatever other formats the process uses.

    The requests of `begin` and `take` are ids and times until they have ended. Where `takes_whole`,
    the exporter of the provider takes them so, else they are made spans of the SDK at their end.
    The spans of `start` are the SDK's own, for engines.
    """

    def __init__(self, provider: TracerProvider, *, takes_whole: bool = False) -> None:
        tracer = provider.get_tracer("tandem")
        if not isinstance(tracer, SdkTracer):
            raise ValueError(f"{type(provider).__name__} is not the provider of the SDK")
        self._tracer = tracer
        self._takes_whole = takes_whole
        self._follows_parent = isinstance(tracer.sampler, ParentBased)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: dict[str, str]) -> SpanIds:
        """Return the ids of a span below the one that `headers` name, and let them name it."""
        ids = SpanIds.below(headers)
        if not ids.parent_id:
            headers.pop("tracestate", None)
        if not ids.parent_id or not self._follows_parent:
            ids = self._sampled(name, ids, headers)
        headers["traceparent"] = ids.traceparent
        return ids

    def _sampled(self, name: str, ids: SpanIds, headers: dict[str, str]) -> SpanIds:
        """Return the ids with the sampler's decision."""
        parent = self._propagator.extract(headers) if ids.parent_id else None
        found = self._tracer.sampler.should_sample(parent, int(ids.trace_id, 16), name)
        flags = (ids.flags & ~SAMPLED) | (found.decision is Decision.RECORD_AND_SAMPLE)
        if not found.trace_state:
            return ids._replace(flags=flags)
        headers["tracestate"] = found.trace_state.to_header()
        return ids._replace(flags=flags, trace_state=headers["tracestate"])

    def take(self, ended: EndedRequest | EndedSpan) -> None:
        """Export what has ended; its ids are sampled."""
        processor = self._tracer.span_processor
        if self._takes_whole:
            processor.on_end(Whole(ended))
            return
        for span in ended.spans():
            processor.on_end(self._readable(span))

    def _readable(self, span: EndedSpan) -> ReadableSpan:
        ids, attributes = span.ids, dict(span.attributes)
        status = Status()
        if span.error:
            attributes["error.type"] = span.error
            status = Status(StatusCode.ERROR, span.error)
        return ReadableSpan(
            span.name,
            _context(ids, ids.span_id),
            _context(ids, ids.parent_id) if ids.parent_id else None,
            self._tracer.resource,
            attributes,
            [Event(name, timestamp=at_ns) for name, at_ns in span.events],
            [] if span.link is None else [Link(_context(span.link, span.link.span_id))],
            SpanKind(span.kind - 1),
            status=status,
            start_time=span.begin_ns,
            end_time=span.end_ns,
        )

    def start(
        self,
        name: str,
        parent: Mapping[str, str],
        kind: Kind = Kind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """Start a span below the one that the headers `parent` name."""
        context = self._propagator.extract(parent)
        return self._tracer.start_span(name, context, SpanKind(kind - 1), attributes)

    def inject(self, headers: dict[str, str], span: Span) -> None:
        """Let `headers` name `span`."""
        self._propagator.inject(headers, context=set_span_in_context(span))

    def set_status(self, span: Span, status: str, description: str | None = None) -> None:
        """Set the status: `ok`, `error` or `unset`, in any case of letters."""
        code = StatusCode[status.upper()]
        span.set_status(code, description if code is StatusCode.ERROR else None)


def _context(ids: SpanIds, span_id: str) -> SpanContext:
    flags = TraceFlags(ids.flags)
    return SpanContext(int(ids.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)
