"""The figures of a load run, from its records. Pure; latencies are in milliseconds."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.places import commonest, places_of, reasons_of
from tandem.bench.report.figures import percentile
from tandem.runtime.errors import ConfigError
from tandem.runtime.tracing.timeline import course, intervals_ms

SLO_METRICS = ("ttft", "ttst", "tpot", "e2el")

DEFINITIONS: Mapping[str, str] = {
    "scheduled": "when the request was due: its arrival time (open loop, trace) or the moment "
    "its slot was free (closed loop). All latencies but those 'from sent' start here.",
    "sent": "when the request's bytes were handed to the socket, after any wait for "
    "--max-in-flight or for a connection.",
    "output event": "one streamed chunk that carries output; a chunk can hold several tokens.",
    "ttft": "time to first token: scheduled to first output event.",
    "ttst": "time to second token: scheduled to second output event, or to the first when that "
    "held the whole answer of two or more tokens.",
    "itl": "inter-token latency: every raw gap between neighboring output events of a request, "
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
    "breakdown": "parts of ttft and ttst by the decode worker's own clock, for servers that send "
    "the timeline of a request. Outside the decode worker: ttft less the worker's time from "
    "receiving a request to sending its first token. Exposed transfer: end of computing to the "
    "last block of KV landed; verification: from there until all blocks are proven; first step: "
    "from there to the second token. Medians of parts need not add up to the median of the whole.",
    "prediction": "error of the decode worker's prediction of the time to its first token, made "
    "when it placed the prompt, against the timeline: |predicted - actual| / actual. For servers "
    "that send both.",
    "percentiles": "linear interpolation between the two nearest ranks.",
}


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
class PredictionErrors:
    """The errors of predicted times to a first token, as shares of the actual times."""

    num_samples: int
    median: float
    share_within_half: float  # of the predictions, at most this far off


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; latencies in ms."""

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
    prefill_reasons: dict[str, int]  # the commonest ones, without their numbers
    num_fallbacks: int  # prompts taken back from a handoff; they enter no breakdown
    latencies_ms: dict[str, Distribution]
    breakdown_ms: dict[str, dict[str, Distribution]]  # local, remote |-> part of the time
    prediction: PredictionErrors | None  # None where the server sends no predictions


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Return the distribution of the values that exist; None when there are none."""
    samples = np.array([value for value in values if value is not None])
    if not len(samples):
        return None
    mean, largest = samples.mean().item(), samples.max().item()
    p50, p90, p95, p99 = np.percentile(samples, (50, 90, 95, 99)).tolist()
    return Distribution(len(samples), mean, p50, p90, p95, p99, largest)


def parse_slos(words: Iterable[str]) -> dict[str, float]:
    """Return `ttft:200 tpot:50` as limits in ms. Raises ConfigError naming the word at fault."""
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
    """Return whether a successful record is within every limit (ms); one that it lacks is met."""
    values = ((getattr(record, f"{name}_s"), limit) for name, limit in slos.items())
    return all(value is None or value * 1e3 <= limit for value, limit in values)


Reducer = Callable[["_Run"], Any]


@dataclass(frozen=True, slots=True)
class _Run:
    """The records of a run by their outcome; `slos` are limits in ms."""

    records: Sequence[RequestRecord]
    finished: Sequence[RequestRecord]
    good: Sequence[RequestRecord]
    slos: Mapping[str, float]
    duration_s: float

    def total(self, name: str) -> int:
        """Return the sum of a count over the successful requests."""
        return sum(getattr(record, name) for record in self.good)

    def rate(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def num_within(self) -> int:
        return sum(meets(record, self.slos) for record in self.good)

    @property
    def num_events(self) -> int:
        return sum(len(record.output_times_s) for record in self.good)


REDUCERS: Mapping[str, Reducer] = {
    "num_requests": lambda run: len(run.records),
    "num_succeeded": lambda run: len(run.good),
    "num_unfinished": lambda run: len(run.records) - len(run.finished),
    "errors": lambda run: dict(Counter(r.error for r in run.finished if r.error).most_common()),
    "duration_s": lambda run: run.duration_s,
    "num_input_tokens": lambda run: run.total("num_input_tokens"),
    "num_output_tokens": lambda run: run.total("num_output_tokens"),
    "num_cached_tokens": lambda run: run.total("num_cached_tokens"),
    "request_throughput": lambda run: run.rate(len(run.good)),
    "input_token_throughput": lambda run: run.rate(run.total("num_input_tokens")),
    "output_token_throughput": lambda run: run.rate(run.total("num_output_tokens")),
    "goodput": lambda run: run.rate(run.num_within) if run.slos else None,
    "goodput_share": lambda run: run.num_within / max(len(run.finished), 1) if run.slos else None,
    "tokens_per_output_event": lambda run: (
        run.total("num_output_tokens") / run.num_events if run.num_events else None
    ),
    "num_short_answers": lambda run: sum(
        r.num_asked_tokens is not None and r.num_output_tokens < r.num_asked_tokens
        for r in run.good
    ),
    "num_without_usage": lambda run: sum(not record.has_usage for record in run.good),
    "prefill_places": lambda run: dict(places_of(run.good)),
    "prefill_reasons": lambda run: commonest(reasons_of(run.good)),
    "num_fallbacks": lambda run: sum(course(r.timeline_ms) == "fallback" for r in run.good),
    "latencies_ms": lambda run: _latencies_ms(run.good),
    "breakdown_ms": lambda run: breakdown_ms(run.good),
    "prediction": lambda run: prediction_errors(run.good),
}


def summarize(records: Sequence[RequestRecord], slos: Mapping[str, float]) -> Summary:
    """Return a run's figures; failed and unfinished requests enter no latency."""
    finished = [record for record in records if not record.unfinished]
    good = [record for record in records if record.succeeded]
    run = _Run(records, finished, good, slos, _duration_s(finished))
    return Summary(**{name: reduce(run) for name, reduce in REDUCERS.items()})


def breakdown_ms(good: Iterable[RequestRecord]) -> dict[str, dict[str, Distribution]]:
    """Return course |-> part |-> its distribution, of the successful records with a timeline."""
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


def prediction_errors(good: Iterable[RequestRecord]) -> PredictionErrors | None:
    """Return the errors of predicted first tokens; None without a record that has a prediction."""
    pairs = [(record.predicted_ms, record.timeline_ms.get("first_token", 0.0)) for record in good]
    errors = sorted(
        abs(predicted - actual) / actual for predicted, actual in pairs if predicted and actual
    )
    if not errors:
        return None
    num_within = sum(error <= 0.5 for error in errors)
    return PredictionErrors(len(errors), percentile(errors, 0.5), num_within / len(errors))


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
