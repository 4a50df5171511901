"""The facts of one ended span of a request, as OpenTelemetry and the trace file take them."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from tandem.runtime.timeline import Timeline

SpanRole = Literal["frontend", "decode", "prefill"]
Value = str | int | float
# A stage's or an interval's name, the interval's begin (None: of a stage), and the end, in
# microseconds since the request's begin.
Part = tuple[str, float | None, float]

# Durations are the monotonic clock's, which never jumps. The wall clock is read once, only to lay
# the spans of several processes side by side.
EPOCH_US = time.time() * 1e6 - time.perf_counter() * 1e6
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

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


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One request at one process. `started_at` is a perf_counter reading."""

    role: SpanRole
    request_id: str
    started_at: float
    end_us: float  # since the start
    stages_ms: Mapping[str, float]
    attributes: Mapping[str, Value]
    trace_id: str  # empty outside a trace

    @classmethod
    def of(
        cls,
        role: SpanRole,
        request_id: str,
        timeline: Timeline,
        attributes: Mapping[str, Value],
        headers: Mapping[str, str],
    ) -> Self:
        """Return the record of a request that ends now; `headers` may have its traceparent."""
        end_us, trace_id = timeline.elapsed_s() * 1e6, trace_id_of(headers)
        started_at, stages_ms = timeline.started_at, timeline.ms()
        return cls(role, request_id, started_at, end_us, stages_ms, attributes, trace_id)

    def parts(self) -> Iterator[Part]:
        """Yield the intervals that fill the request, and the stages that end none of them."""
        names = dict(_SLICES[self.role])
        if "computed" in self.stages_ms:  # remotely: the token came before the KV
            names.pop("first_token", None)
        begin_us = 0.0
        for stage, ms in [*self.stages_ms.items(), ("", self.end_us / 1e3)]:
            us = min(ms * 1e3, self.end_us)
            name = names.get(stage) if stage else _LAST_SLICE[self.role]
            if name is not None:
                yield name, begin_us, us
                begin_us = us
            elif stage != "received":
                yield stage, None, us


def trace_id_of(headers: Mapping[str, str]) -> str:
    """Return the trace id of a W3C traceparent; empty without a valid one."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return "" if found is None else found[1]


def wall_clock_ns(at: float) -> int:
    """Return the unix time of a perf_counter reading, in nanoseconds."""
    return int((at * 1e6 + EPOCH_US) * 1e3)
