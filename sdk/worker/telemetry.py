"""OpenTelemetry spans for engines; where nothing takes spans they do nothing.

    with telemetry.start_span(context, "load_kv", num_blocks=8) as span:
        span.add_event("landed")

Every request has a span named `engine.generate`, whose parent is the caller's (W3C `traceparent`).
"""

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from tandem.runtime.tracing import otel
from tandem.runtime.tracing.ended_span import Kind
from tandem.sdk.worker.context import Context

_TRACE_HEADERS = ("traceparent", "tracestate")


class SpanProxy:
    """A span, or none; every method may be called in either case."""

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute: a string, number, boolean, or a list of one of them."""
        if self._span is not None:
            self._span.set_attribute(key, value)

    def add_event(self, name: str, attrs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Add an event that happens now."""
        if self._span is not None:
            self._span.add_event(name, {**(attrs or {}), **more})

    def set_status(self, status: str, description: str | None = None) -> None:
        """Set the status: `ok`, `error` or `unset`, in any case of letters."""
        if self._span is not None:
            tracer = otel.tracer()
            if tracer is not None:
                tracer.set_status(self._span, status, description)

    def close(self) -> None:
        """End the span; leaving `with` does so too."""
        if self._span is not None:
            self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._span is not None and isinstance(error, Exception):
            self._span.record_exception(error)
            self.set_status("error", str(error))
        self.close()


def current_span(context: Context) -> SpanProxy:
    """Return the request's span. The worker ends it; an engine adds to it."""
    return SpanProxy(context.span)


def start_span(context: Context, name: str, **attrs: Any) -> SpanProxy:
    """Start a span below the request's; leaving `with` ends it."""
    tracer = otel.tracer()
    if tracer is None or context.span is None:
        return SpanProxy()
    return SpanProxy(tracer.start(name, context.headers, attributes=attrs))


def trace_headers(context: Context) -> dict[str, str] | None:
    """Return W3C headers for calls outside the cluster; None outside a trace."""
    headers = {name: context.headers[name] for name in _TRACE_HEADERS if name in context.headers}
    return headers if "traceparent" in headers else None


def engine_trace_kwargs(
    context: Context, *, kwarg_name: str = "trace_headers", enabled: bool = True
) -> dict[str, dict[str, str]]:
    """Return `{kwarg_name: headers}` as keywords of an engine's call; empty outside a trace."""
    headers = trace_headers(context) if enabled else None
    return {} if headers is None else {kwarg_name: headers}


@contextlib.contextmanager
def request_span(context: Context, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Run a request in the worker's span, the parent of calls made with its context."""
    tracer = otel.tracer()
    if tracer is None:
        yield
        return
    context.span = tracer.start(name, context.headers, Kind.SERVER, attributes)
    tracer.inject(context.headers, context.span)
    try:
        with SpanProxy(context.span):
            yield
    finally:
        context.span = None
