"""OpenTelemetry spans of Tandem's own workers; without `opentelemetry-api` they do nothing.

The API exports nothing by itself: `opentelemetry-instrument`, or a program that sets a tracer
provider, decides where spans go.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.runtime.trace import Part, wall_clock_ns

_has_api = importlib.util.find_spec("opentelemetry") is not None
_trace: Any = importlib.import_module("opentelemetry.trace") if _has_api else None
_propagate: Any = importlib.import_module("opentelemetry.propagate") if _has_api else None
_tracer: Any = _trace.get_tracer("tandem") if _has_api else None


class RequestSpan:
    """The span of one request at a worker, a child of the span that `headers` name.

    After construction `headers` name this span, so that the next worker's is its child.
    `started_at` is a perf_counter reading.
    """

    __slots__ = ("_span", "_started_at")

    def __init__(self, name: str, headers: dict[str, str], started_at: float) -> None:
        self._started_at = started_at
        self._span: Any = None
        if _trace is None or isinstance(_trace.get_tracer_provider(), _trace.ProxyTracerProvider):
            return  # nothing takes spans
        parent = _propagate.extract(headers)
        span = _tracer.start_span(name, context=parent, start_time=self._at(0.0))
        if span.is_recording():
            self._span = span
            _propagate.inject(headers, context=_trace.set_span_in_context(span))

    @property
    def is_recorded(self) -> bool:
        """True when something takes the span."""
        return self._span is not None

    def end(
        self, parts: Iterable[Part], attributes: Mapping[str, str | int | float], error: str = ""
    ) -> None:
        """End the span, with a child for each interval and an event for each other stage."""
        span = self._span
        if span is None:
            return
        span.set_attributes(attributes)
        if error:
            span.set_status(_trace.StatusCode.ERROR, error)
        within = _trace.set_span_in_context(span)
        for name, begin_us, end_us in parts:
            if begin_us is None:
                span.add_event(name, timestamp=self._at(end_us))
            else:
                child = _tracer.start_span(name, context=within, start_time=self._at(begin_us))
                child.end(self._at(end_us))
        span.end()

    def _at(self, elapsed_us: float) -> int:
        return wall_clock_ns(self._started_at + elapsed_us / 1e6)
