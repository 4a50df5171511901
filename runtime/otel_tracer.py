"""OpenTelemetry's API, behind three calls; imported only where something takes spans."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    StatusCode,
    TracerProvider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


class Tracer:
    """Spans whose parents are named by W3C headers, whatever other formats the process uses."""

    SERVER, CLIENT, INTERNAL = SpanKind.SERVER, SpanKind.CLIENT, SpanKind.INTERNAL
    PRODUCER, CONSUMER = SpanKind.PRODUCER, SpanKind.CONSUMER

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("tandem")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        parent: Mapping[str, str] | Span,
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int | None = None,
        link: Span | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """Start a span below `parent`, which headers may name, with a link to the span `link`."""
        if isinstance(parent, Span):
            context = set_span_in_context(parent)
        else:
            context = self._propagator.extract(parent)
        return self._tracer.start_span(
            name,
            context=context,
            kind=kind,
            attributes=attributes,
            start_time=start_ns,
            links=[] if link is None else [Link(link.get_span_context())],
        )

    def inject(self, headers: dict[str, str], span: Span) -> None:
        """Let `headers` name `span`."""
        self._propagator.inject(headers, context=set_span_in_context(span))

    def end(self, span: Span, error: str = "", end_ns: int | None = None) -> None:
        """End a span; one with an `error` has failed."""
        if error:
            span.set_attribute("error.type", error)
            self.set_status(span, "error", error)
        span.end(end_ns)

    def set_status(self, span: Span, status: str, description: str | None = None) -> None:
        """Set the status: `ok`, `error` or `unset`, in any case of letters."""
        code = StatusCode[status.upper()]
        span.set_status(code, description if code is StatusCode.ERROR else None)
