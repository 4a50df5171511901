"""What a load run measured, as pure arithmetic on request records. No clock, no I/O.

All times of a record are seconds since the run began. Latencies are reported in milliseconds.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.runtime.errors import ConfigError
from tandem.runtime.timeline import course, intervals_ms

SLO_METRICS = ("ttft", "ttst", "tpot", "e2el")

DEFINITIONS: Mapping[str, str] = {
    "scheduled": "when the request was due: its arrival time (open loop, trace) or the moment "
    "its slot was free (closed loop). All latencies start here unless they say 'from sent'.",
    "sent": "when the request's bytes were handed to the socket, after any wait for "
    "--max-in-flight or for a connection.",
    "output event": "one streamed chunk that carries output; a chunk can hold several tokens.",
    "ttft": "time to first token: scheduled to first output event.",
    "ttst": "time to second token: scheduled to second output event, or to the first when that "
    "held the whole answer of two or more tokens.",
    "itl": "inter-token latency: every raw gap between neighbouring output events of a request, "
    "pooled over all requests; not divided when a chunk holds several tokens (see tokens per "
    "output event), zero for events that one read of the socket brought.",
    "tpot": "time per output token, one value per request: (e2el - ttft) / (output tokens - 1). "
    "AIPerf calls this value inter token latency.",
    "e2el": "end-to-end latency: scheduled to last byte of the response.",
    "duration": "first scheduled time to last response, the tail of the run included.",
    "request throughput": "successful requests / duration.",
    "token throughput": "tokens of successful requests as `usage` counts them / duration; input "
    "tokens include those served from the prefix cache.",
    "goodput": "successful requests that meet every --goodput limit / duration.",
    "breakdown": "parts of ttft and ttst by the decode worker's own clock, for servers that tell "
    "the timeline of a request. Outside the decode worker: ttft less the worker's time from "
    "receiving a request to sending its first token. Exposed transfer: end of computing to the "
    "last block of KV landed; verification: from there until all blocks are proven; first step: "
    "from there to the second token. Medians of parts need not add up to the median of the whole.",
    "percentiles": "linear interpolation between the two nearest ranks.",
}


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it; `error` empty means that it succeeded."""

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    output_times_s: list[float] = field(default_factory=list)  # of output events
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_asked_tokens: int | None = None  # fixed output length, when one was asked for
    has_usage: bool = False
    status: int = 0
    prefill_place: str = ""  # local | remote, from the x-tandem-prefill header
    finish_reason: str = ""
    timeline_ms: dict[str, float] = field(default_factory=dict)  # of its decode worker, if told
    error: str = ""  # kind
    error_message: str = ""
    unfinished: bool = False  # cut off by an interrupted run

    @property
    def succeeded(self) -> bool:
        return not self.error and not self.unfinished

    @property
    def ttft_s(self) -> float | None:
        return self.output_times_s[0] - self.scheduled_s if self.output_times_s else None

    @property
    def ttft_from_sent_s(self) -> float | None:
        return self.output_times_s[0] - self.sent_s if self.output_times_s else None

    @property
    def ttst_s(self) -> float | None:
        times = self.output_times_s
        if not times or self.num_output_tokens < 2:
            return None
        return (times[1] if len(times) > 1 else times[0]) - self.scheduled_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        if not self.output_times_s or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.output_times_s[0]) / (self.num_output_tokens - 1)

    def gaps_s(self) -> list[float]:
        """The raw gaps between neighbouring output events."""
        return [later - earlier for earlier, later in itertools.pairwise(self.output_times_s)]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of one metric, in the unit of the samples."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a run's table and JSON show; latencies in ms."""

    num_requests: int
    num_succeeded: int
    num_unfinished: int
    errors: dict[str, int]  # kind |-> count
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    request_throughput: float  # 1/s
    input_token_throughput: float  # 1/s
    output_token_throughput: float  # 1/s
    goodput: float | None  # 1/s
    goodput_share: float | None  # of all finished requests, failed ones included
    tokens_per_output_event: float | None
    num_short_answers: int  # fewer tokens than the fixed length asked for
    num_without_usage: int  # their output tokens are counted as output events
    prefill_places: dict[str, int]
    num_fallbacks: int  # prompts taken back from a handoff; they enter no breakdown
    latencies_ms: dict[str, Distribution]
    breakdown_ms: dict[str, dict[str, Distribution]]  # local, remote |-> part of the time


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of ascending values, linearly interpolated. Raises ValueError on none."""
    if not ordered:
        raise ValueError("percentile of no values")
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the values that exist; None when there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        num_samples=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def parse_slos(words: Iterable[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as limits in ms. Raises ConfigError naming the word at fault."""
    slos: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, colon, limit = word.partition(":")
        if not colon or name not in SLO_METRICS:
            raise ConfigError(
                f"{word!r}: expected METRIC:MS with METRIC of {', '.join(SLO_METRICS)}"
            )
        try:
            slos[name] = float(limit)
        except ValueError as exc:
            raise ConfigError(f"{word!r}: {limit!r} is not a number of milliseconds") from exc
        if not slos[name] > 0:
            raise ConfigError(f"{word!r}: the limit must be above 0 ms")
    return slos


def meets(record: RequestRecord, slos: Mapping[str, float]) -> bool:
    """Whether a successful record is within every limit (ms); a metric it lacks is met."""
    return all(
        value is None or value * 1e3 <= slos[name]
        for name, value in (
            ("ttft", record.ttft_s),
            ("ttst", record.ttst_s),
            ("tpot", record.tpot_s),
            ("e2el", record.e2el_s),
        )
        if name in slos
    )


def summarize(records: Sequence[RequestRecord], slos: Mapping[str, float]) -> Summary:
    """The run's figures from its records; failed and unfinished requests enter no latency."""
    good = [record for record in records if record.succeeded]
    finished = [record for record in records if not record.unfinished]
    duration_s = _duration_s(finished)
    num_input, num_output = (
        sum(record.num_input_tokens for record in good),
        sum(record.num_output_tokens for record in good),
    )
    num_within = sum(meets(record, slos) for record in good) if slos else None
    num_events = sum(len(record.output_times_s) for record in good)
    return Summary(
        num_requests=len(records),
        num_succeeded=len(good),
        num_unfinished=len(records) - len(finished),
        errors=dict(Counter(r.error for r in finished if r.error).most_common()),
        duration_s=duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=sum(record.num_cached_tokens for record in good),
        request_throughput=_rate(len(good), duration_s),
        input_token_throughput=_rate(num_input, duration_s),
        output_token_throughput=_rate(num_output, duration_s),
        goodput=None if num_within is None else _rate(num_within, duration_s),
        goodput_share=None if num_within is None else num_within / max(len(finished), 1),
        tokens_per_output_event=num_output / num_events if num_events else None,
        num_short_answers=sum(
            r.num_asked_tokens is not None and r.num_output_tokens < r.num_asked_tokens
            for r in good
        ),
        num_without_usage=sum(not record.has_usage for record in good),
        prefill_places=dict(Counter(r.prefill_place for r in good if r.prefill_place)),
        num_fallbacks=sum(course(record.timeline_ms) == "fallback" for record in good),
        latencies_ms=_latencies_ms(good),
        breakdown_ms=breakdown_ms(good),
    )


def breakdown_ms(good: Iterable[RequestRecord]) -> dict[str, dict[str, Distribution]]:
    """Course |-> part |-> its distribution over the successful records that have a timeline."""
    parts: dict[str, dict[str, list[float]]] = {}
    for record in good:
        stages = record.timeline_ms
        kind = course(stages)
        if "first_token" not in stages or kind == "fallback":
            continue
        mine = parts.setdefault(kind, {})
        for part, ms in _parts_ms(record).items():
            mine.setdefault(part, []).append(ms)
    return {
        kind: {part: spread for part, ms in mine.items() if (spread := distribution(ms))}
        for kind, mine in sorted(parts.items())
    }


def _parts_ms(record: RequestRecord) -> dict[str, float]:
    parts = intervals_ms(record.timeline_ms)
    if record.ttft_s is not None:
        parts["ttft"] = record.ttft_s * 1e3
        parts["outside"] = max(0.0, parts["ttft"] - record.timeline_ms["first_token"])
    if record.ttst_s is not None:
        parts["ttst"] = record.ttst_s * 1e3
    return parts


def _latencies_ms(good: Sequence[RequestRecord]) -> dict[str, Distribution]:
    places = sorted({record.prefill_place for record in good if record.prefill_place})
    seconds: dict[str, list[float | None]] = {
        "ttft": [record.ttft_s for record in good],
        "ttst": [record.ttst_s for record in good],
        "itl": [gap for record in good for gap in record.gaps_s()],
        "tpot": [record.tpot_s for record in good],
        "e2el": [record.e2el_s for record in good],
        "ttft_from_sent": [record.ttft_from_sent_s for record in good],
        "e2el_from_sent": [record.end_s - record.sent_s for record in good],
        "send_delay": [record.sent_s - record.scheduled_s for record in good],
    }
    for place in places:
        seconds[f"ttft_{place}"] = [r.ttft_s for r in good if r.prefill_place == place]
    found = {
        name: distribution(None if value is None else value * 1e3 for value in values)
        for name, values in seconds.items()
    }
    return {name: spread for name, spread in found.items() if spread is not None}


def _duration_s(finished: Sequence[RequestRecord]) -> float:
    if not finished:
        return 0.0
    return max(r.end_s for r in finished) - min(r.scheduled_s for r in finished)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
