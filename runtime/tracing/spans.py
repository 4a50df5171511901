"""The spans of requests, by OpenTelemetry's conventions for generative AI.

A frontend's span has a call for each decode worker that was tried, the worker's span is below the
call, and the ticket's and the prefill worker's below that. Without a tracer no span costs anything;
with one, a span is ids and times until it has ended.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tandem.runtime.errors import TandemError
from tandem.runtime.tracing import otel
from tandem.runtime.tracing.ended_span import EndedRequest, EndedSpan, Kind
from tandem.runtime.tracing.span_ids import SpanIds
from tandem.runtime.tracing.span_record import SpanRecord, SpanRole, Value, wall_clock_ns
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.tracing.trace import TraceFile


class RequestSpan:
    """The span of one request at one process, a child of the span that `headers` name.

    After construction `headers` name this span, so that the next process's is its child.
    """

    __slots__ = ("_handoff", "_handoff_at", "_headers", "_ids", "_role", "timeline")

    def __init__(self, role: SpanRole, headers: dict[str, str], timeline: Timeline) -> None:
        self.timeline = timeline
        self._headers, self._role = headers, role
        self._ids = _begun(f"tandem.{role}", headers)
        self._handoff: SpanIds | None = None
        self._handoff_at = 0.0  # perf_counter

    @property
    def traceparent(self) -> str:
        """The W3C name of this span; empty where nothing takes spans."""
        return "" if self._ids is None else self._ids.traceparent

    def is_wanted(self, file: TraceFile) -> bool:
        """Return True when the trace file or OpenTelemetry takes this span."""
        return file.is_open or (self._ids is not None and self._ids.is_sampled)

    def begin_handoff(self) -> dict[str, str]:
        """Return the headers of a ticket; they name its own span, below this one."""
        if self._ids is None:
            return self._headers
        self._handoff, self._handoff_at = self._ids.child(), time.perf_counter()
        return {**self._headers, "traceparent": self._handoff.traceparent}

    def end_handoff(self, error: str = "") -> None:
        """End the ticket's span; `error` is the reason why its KV is of no use."""
        if self._handoff is not None:
            _end("tandem.handoff", Kind.PRODUCER, self._handoff, self._handoff_at, error=error)

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
        ids, tracer = self._ids, otel.tracer()
        if ids is not None and ids.is_sampled and tracer is not None:
            name = name or f"tandem.{self._role}"
            kind = Kind.CONSUMER if self._role == "prefill" else Kind.SERVER
            known = conventions or {}
            tracer.take(EndedRequest(name, kind, ids, record, known, error, self._handoff))


class CallSpan:
    """The span of a call to a worker; `follows` is the failed call whose answer it resumes.

    `headers` name this span, and are the given ones where nothing takes spans.
    """

    __slots__ = ("_attributes", "_begun_at", "_failed", "_ids", "headers")

    def __init__(
        self, headers: dict[str, str], follows: "CallSpan | None", attributes: Mapping[str, Value]
    ) -> None:
        self.headers = headers
        self._ids: SpanIds | None = None
        if (tracer := otel.tracer()) is None:
            return
        self.headers = dict(headers)
        self._ids = tracer.begin("tandem.call", self.headers)
        self._failed = None if follows is None else follows._ids
        self._attributes, self._begun_at = attributes, time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ids is None:
            return
        reason = "" if error is None else type(error).__name__
        code = error.code if isinstance(error, TandemError) else reason
        attributes = {f"tandem.{key}": value for key, value in self._attributes.items()}
        _end("tandem.call", Kind.CLIENT, self._ids, self._begun_at, attributes, self._failed, code)


def _begun(name: str, headers: dict[str, str]) -> SpanIds | None:
    """Return the ids of a span that begins, which `headers` name then; None without a tracer."""
    tracer = otel.tracer()
    return None if tracer is None else tracer.begin(name, headers)


def _end(
    name: str,
    kind: Kind,
    ids: SpanIds,
    begun_at: float,  # perf_counter
    attributes: Mapping[str, Value] | None = None,
    link: SpanIds | None = None,
    error: str = "",
) -> None:
    """Export a span that ends now."""
    tracer = otel.tracer()
    if tracer is not None and ids.is_sampled:
        begin_ns, end_ns = wall_clock_ns(begun_at), wall_clock_ns(time.perf_counter())
        own = attributes or {}
        tracer.take(EndedSpan(name, kind, ids, begin_ns, end_ns, own, link=link, error=error))
