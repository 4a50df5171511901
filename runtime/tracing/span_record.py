"""The facts of one ended request at one process, as OpenTelemetry and the trace file take them."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from tandem.runtime.tracing.span_ids import trace_id_of
from tandem.runtime.tracing.timeline import Timeline

SpanRole = Literal["frontend", "decode", "prefill"]
Value = str | int | float
# A stage's or an interval's name, the interval's begin (None: of a stage), and the end, in
# microseconds since the request's begin.
Part = tuple[str, float | None, float]

# Durations are the monotonic clock's, which never jumps. The wall clock is read once, only to lay
# the spans of several processes side by side.
EPOCH_US = time.time() * 1e6 - time.perf_counter() * 1e6

# The stage that ends a slice |-> the slice's name. Any other stage is a tick on the row.
_SLICES: Mapping[SpanRole, Mapping[str, str]] = {
    "frontend": {"first_token": "first token"},
    "decode": {
        "queued": "placement",
        "claimed": "queue",
        "prefix_pulled": "prefix pull",
        "computed": "compute",
        "landed": "exposed transfer",
        "verified": "verification",
        "first_token": "prefill",
        "first_step": "first step",
    },
    "prefill": {
        "claimed": "claim",
        "prefix_pulled": "prefix pull",
        "computed": "compute",
        "last_write": "exposed transfer",
    },
}
_LAST_SLICE: Mapping[SpanRole, str] = {
    "frontend": "answer",
    "decode": "decode",
    "prefill": "settle",
}


@dataclass(slots=True)
class SpanRecord:
    """One request at one process. Its timeline gets no more marks."""

    role: SpanRole
    request_id: str
    timeline: Timeline
    end_us: float  # since the timeline's start
    attributes: Mapping[str, Value]
    headers: Mapping[str, str]  # they may have a traceparent

    @classmethod
    def of(
        cls,
        role: SpanRole,
        request_id: str,
        timeline: Timeline,
        attributes: Mapping[str, Value],
        headers: Mapping[str, str],
    ) -> Self:
        """Return the record of a request that ends now."""
        return cls(role, request_id, timeline, timeline.elapsed_s() * 1e6, attributes, headers)

    @property
    def trace_id(self) -> str:
        """The id of the request's trace; empty outside one."""
        return trace_id_of(self.headers)

    def parts(self) -> Iterator[Part]:
        """Yield the intervals that fill the request, and the stages that end none of them."""
        names, stages_ms = dict(_SLICES[self.role]), self.timeline.ms()
        if "computed" in stages_ms:  # remotely: the token came before the KV
            names.pop("first_token", None)
        begin_us = 0.0
        for stage, ms in [*stages_ms.items(), ("", self.end_us / 1e3)]:
            us = min(ms * 1e3, self.end_us)
            name = names.get(stage) if stage else _LAST_SLICE[self.role]
            if name is not None:
                yield name, begin_us, us
                begin_us = us
            elif stage != "received":
                yield stage, None, us


def wall_clock_ns(at: float) -> int:
    """Return the unix time of a perf_counter reading, in nanoseconds."""
    return int((at * 1e6 + EPOCH_US) * 1e3)
