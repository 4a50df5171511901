"""The ids of spans, and the W3C headers that take them from process to process."""

import os
import random
import re
from collections.abc import Mapping
from typing import NamedTuple, Self

SAMPLED, RANDOM = 1, 2  # trace flags: the span is exported; the trace id is random
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)

_random = random.Random()  # a call of the system for each id costs more than the rest of a span
os.register_at_fork(after_in_child=_random.seed)


class SpanIds(NamedTuple):
    """One span of a trace. All ids are lower-case hexadecimal digits."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: the span is the first of its trace
    flags: int
    trace_state: str

    @classmethod
    def below(cls, headers: Mapping[str, str]) -> Self:
        """Return new ids below the span that `headers` name, else those of a new trace."""
        found = _parsed(headers)
        if found is None:
            return cls(_digits(32), _digits(16), "", RANDOM, "")
        _, trace_id, parent_id, flags, _ = found.groups()
        state = headers.get("tracestate", "")
        return cls(trace_id, _digits(16), parent_id, int(flags, 16), state)

    @property
    def is_sampled(self) -> bool:
        """True when the span is exported."""
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        """The header that names this span."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def child(self) -> "SpanIds":
        """Return the ids of a new span below this one."""
        span_id = _digits(16)
        return SpanIds(self.trace_id, span_id, self.span_id, self.flags, self.trace_state)


def _digits(number: int) -> str:
    return f"{_random.getrandbits(4 * number):0{number}x}"


def trace_id_of(headers: Mapping[str, str]) -> str:
    """Return the trace id of a W3C traceparent; empty without a valid one."""
    found = _parsed(headers)
    return "" if found is None else found[2]


def span_id_of(headers: Mapping[str, str]) -> str:
    """Return the id of the span that a W3C traceparent names; empty without a valid one."""
    found = _parsed(headers)
    return "" if found is None else found[3]


def _parsed(headers: Mapping[str, str]) -> re.Match[str] | None:
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is not None and found[1] == "00" and found[5]:  # of later versions alone
        return None
    return found
