"""Spans that have ended, as OpenTelemetry's exporters take them.

The event loop keeps a request's ids and timeline; its spans are made of them in the exporter's
thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tandem.runtime.tracing.span_ids import SpanIds
from tandem.runtime.tracing.span_record import SpanRecord, Value, wall_clock_ns
from tandem.runtime.tracing.timeline import course

PROVIDER = "tandem"  # gen_ai.provider.name


class Kind(IntEnum):
    """The kinds of spans, by OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


@dataclass(slots=True)
class EndedSpan:
    """One span; `link` is the span of a failed try whose work it does again."""

    name: str
    kind: Kind
    ids: SpanIds
    begin_ns: int  # unix time, as are all of a span
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[tuple[str, int]] = ()  # name and time
    link: SpanIds | None = None
    error: str = ""  # the cause, of a span that failed

    def spans(self) -> Iterator["EndedSpan"]:
        """Yield the span."""
        yield self


@dataclass(slots=True)
class EndedRequest:
    """A request at one process: its own span, and one for each interval of its timeline."""

    name: str
    kind: Kind
    ids: SpanIds
    record: SpanRecord
    conventions: Mapping[str, Value]  # attributes that OpenTelemetry names
    error: str
    handoff: SpanIds | None  # the ticket of its prompt

    def spans(self) -> Iterator[EndedSpan]:
        """Yield the intervals and the request; its other stages are the request's events.

        A local prefill after a handoff that failed has a link to it.
        """
        record, events = self.record, []
        start_ns = wall_clock_ns(record.timeline.started_at)
        failed = self.handoff
        if failed is not None and course(record.timeline.ms()) != "fallback":
            failed = None
        for name, begin_us, end_us in record.parts():
            end_ns = start_ns + round(end_us * 1e3)
            if begin_us is None:
                events.append((name, end_ns))
                continue
            begin_ns = start_ns + round(begin_us * 1e3)
            part = EndedSpan(name, Kind.INTERNAL, self.ids.child(), begin_ns, end_ns)
            part.link = failed if name == "prefill" else None
            yield part
        own = {"request_id": record.request_id, **record.attributes}
        attributes = {f"tandem.{key}": value for key, value in own.items()}
        attributes |= {"gen_ai.provider.name": PROVIDER, **self.conventions}
        end_ns = start_ns + round(record.end_us * 1e3)
        yield EndedSpan(
            self.name, self.kind, self.ids, start_ns, end_ns, attributes, events, error=self.error
        )
