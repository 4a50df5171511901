"""The spans of requests, by OpenTelemetry's conventions for generative AI.

A frontend's span has a call for each decode worker that was tried, the worker's span is below the
call, and the ticket's and the prefill worker's below that. Without a tracer no span costs anything.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tandem.runtime import otel
from tandem.runtime.errors import TandemError
from tandem.runtime.span_record import SpanRecord, SpanRole, Value, wall_clock_ns
from tandem.runtime.timeline import Timeline, course
from tandem.runtime.trace import TraceFile

if TYPE_CHECKING:
    from tandem.runtime.otel_tracer import Tracer

PROVIDER = "tandem"  # gen_ai.provider.name


class RequestSpan:
    """The span of one request at one process, a child of the span that `headers` name.

    After construction `headers` name this span, so that the next process's is its child.
    """

    __slots__ = ("_handoff", "_headers", "_role", "_span", "timeline")

    def __init__(self, role: SpanRole, headers: dict[str, str], timeline: Timeline) -> None:
        self.timeline = timeline
        self._headers, self._role = headers, role
        self._span: Any = None
        self._handoff: Any = None
        if (tracer := otel.tracer()) is not None:
            kind = tracer.CONSUMER if role == "prefill" else tracer.SERVER
            start_ns = wall_clock_ns(timeline.started_at)
            self._span = tracer.start(f"tandem.{role}", headers, kind, start_ns)
            tracer.inject(headers, self._span)

    @property
    def traceparent(self) -> str:
        """The W3C name of this span; empty where nothing takes spans."""
        return "" if self._span is None else self._headers.get("traceparent", "")

    def is_wanted(self, file: TraceFile) -> bool:
        """Return True when the trace file or OpenTelemetry takes this span."""
        return file.is_open or (self._span is not None and self._span.is_recording())

    def begin_handoff(self) -> dict[str, str]:
        """Return the headers of a ticket; they name its own span, below this one."""
        tracer = otel.tracer()
        if self._span is None or tracer is None:
            return self._headers
        headers = dict(self._headers)
        self._handoff = tracer.start("tandem.handoff", headers, tracer.PRODUCER, _now_ns())
        tracer.inject(headers, self._handoff)
        return headers

    def end_handoff(self, error: str = "") -> None:
        """End the ticket's span; `error` is the reason why its KV is of no use."""
        if self._handoff is not None and (tracer := otel.tracer()) is not None:
            tracer.end(self._handoff, error, _now_ns())

    def end(
        self,
        file: TraceFile,
        request_id: str,
        attributes: Mapping[str, Value],
        error: str = "",
        *,
        name: str = "",
        conventions: Mapping[str, Value] | None = None,
    ) -> None:
        """End the span and give its record to both exporters.

        `conventions` are attributes that OpenTelemetry names; those of `attributes` are our own.
        """
        if not self.is_wanted(file):
            return
        record = SpanRecord.of(self._role, request_id, self.timeline, attributes, self._headers)
        file.record(record)
        span, tracer = self._span, otel.tracer()
        if span is None or tracer is None:
            return
        if name:
            span.update_name(name)
        own = {"request_id": request_id, **attributes}
        span.set_attributes({f"tandem.{key}": value for key, value in own.items()})
        span.set_attributes({"gen_ai.provider.name": PROVIDER, **(conventions or {})})
        self._add_parts(record, tracer)
        tracer.end(span, error, self._at_ns(record.end_us))

    def _add_parts(self, record: SpanRecord, tracer: "Tracer") -> None:
        """Add a child for each interval and an event for each other stage.

        A local prefill after a handoff that failed has a link to it.
        """
        is_fallback = self._handoff is not None and course(record.stages_ms) == "fallback"
        for name, begin_us, end_us in record.parts():
            if begin_us is None:
                self._span.add_event(name, timestamp=self._at_ns(end_us))
                continue
            failed = self._handoff if is_fallback and name == "prefill" else None
            begin_ns = self._at_ns(begin_us)
            child = tracer.start(name, self._span, tracer.INTERNAL, begin_ns, failed)
            tracer.end(child, end_ns=self._at_ns(end_us))

    def _at_ns(self, elapsed_us: float) -> int:
        return wall_clock_ns(self.timeline.started_at + elapsed_us / 1e6)


class CallSpan:
    """The span of a call to a worker; `follows` is the failed call whose answer it resumes.

    `headers` name this span, and are the given ones where nothing takes spans.
    """

    __slots__ = ("_span", "headers")

    def __init__(
        self, headers: dict[str, str], follows: "CallSpan | None", attributes: Mapping[str, Value]
    ) -> None:
        self.headers = headers
        self._span: Any = None
        if (tracer := otel.tracer()) is not None:
            self.headers = dict(headers)
            failed = None if follows is None else follows._span
            self._span = tracer.start("tandem.call", headers, tracer.CLIENT, _now_ns(), failed)
            self._span.set_attributes({f"tandem.{key}": v for key, v in attributes.items()})
            tracer.inject(self.headers, self._span)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._span is not None and (tracer := otel.tracer()) is not None:
            reason = "" if error is None else type(error).__name__
            code = error.code if isinstance(error, TandemError) else reason
            tracer.end(self._span, code, _now_ns())


def _now_ns() -> int:
    return wall_clock_ns(time.perf_counter())
