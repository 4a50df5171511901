"""Prometheus metrics of a decode worker."""

import contextlib
from collections import Counter as Counts
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from tandem.decode.config import DisaggConfig
from tandem.decode.requests import ActiveRequest
from tandem.engine.schedule.outputs import LoadStats
from tandem.queue.prefill_queue import QueueDepth
from tandem.runtime.process.metrics import LATENCY_BUCKETS_S, counter, gauge, histogram
from tandem.runtime.tracing.timeline import Stage, course, intervals_ms
from tandem.transfer.handoff.causes import CloseCause, DropCause

# Verification on a GPU is tens of microseconds, a wait in the queue can be seconds.
INTERVAL_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, *LATENCY_BUCKETS_S)
ERROR_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
HANDOFF_STAGES: tuple[Stage, ...] = (
    "queued", "claimed", "prefix_pulled", "computed", "first_write", "last_write", "landed",
    "verified", "first_step",
)  # fmt: skip
# Causes that share a value of the label `end`.
_END_OF = {
    CloseCause.PEER_GONE: "peer_lost",
    CloseCause.LEASE_EXPIRED: "failed",
    CloseCause.VIOLATION: "failed",
    CloseCause.INCOMPLETE: "failed",
}


class DecodeMetrics:
    """Counts of requests, decisions and handoffs, and gauges of the engine's load."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.prompts: Counts[tuple[str, str]] = Counts()  # (place, cause) |-> number
        self._series: dict[tuple[object, ...], Any] = {}  # by metric and labels
        self._requests = counter(
            "decode_requests_total", "Finished streams by outcome", ["model", "outcome"]
        )
        self._prefills = counter(
            "decode_prefills_total", "Prompts by place and cause", ["model", "place", "cause"]
        )
        self._handoffs = counter(
            "decode_handoffs_total", "Remote prefills by how they ended", ["model", "end"]
        )
        # a rate needs the zero before the first one
        for end in ("admitted", *{_END_OF.get(cause, cause) for cause in CloseCause}):
            self._handoffs.labels(model, end)
        self._dropped = counter(
            "decode_handoff_messages_dropped_total",
            "Messages of handoffs that were not applied",
            ["model", "reason"],
        )
        self._mismatches = counter(
            "decode_kv_mismatches_total",
            "Landed blocks whose checksum was not the announced one",
            ["model", "prefill_instance"],
        )
        self._first_token = histogram(
            "decode_first_token_seconds",
            "From the request's arrival at the worker to its first token",
            ["model", "place"],
        )
        self._prediction_error = histogram(
            "prediction_error",
            "Time to the first token over its prediction, by the place of the prompt",
            ["model", "place"],
            ERROR_BUCKETS,
        )
        self._stages = histogram(
            "decode_handoff_stage_seconds",
            "From the request's arrival to each stage of its handoff",
            ["model", "stage"],
        )
        self._intervals = histogram(
            "decode_handoff_interval_seconds",
            "Parts of the time to the first and to the second token of an admitted handoff",
            ["model", "interval"],
            INTERVAL_BUCKETS_S,
        )
        self._preemptions = counter(
            "decode_preemptions_total",
            "Sequences that lost their blocks to others and were computed again",
            ["model"],
        )
        self._num_preemptions = 0  # counted so far
        self._aims: DisaggConfig | None = None  # whose targets are recorded
        self._excluded = gauge(
            "decode_excluded_prefill_workers",
            "Prefill workers that get no work because their KV failed verification repeatedly",
            ["model"],
        )
        self._jobs = gauge(
            "decode_queued_jobs", "Jobs of the model's prefill queue by state", ["model", "state"]
        )
        self._queued_tokens = gauge(
            "decode_queued_tokens", "Uncached prompt tokens in the model's prefill queue", ["model"]
        )
        self._targets = gauge(
            "decode_target_seconds", "Latency target in force", ["model", "target"]
        )
        self._blocks = gauge("decode_kv_blocks", "KV blocks by state", ["model", "state"])
        self._sequences = gauge("decode_sequences", "Sequences by state", ["model", "state"])

    def finished(self, active: ActiveRequest, outcome: str) -> None:
        """Record a stream that has ended."""
        self._of(self._requests, outcome).inc()
        if active.decision is None:
            return
        place = active.decision.place
        self._of(self._prefills, place, active.decision.cause).inc()
        self.prompts[place, active.decision.cause] += 1
        stages = active.timeline.marks
        if "first_token" in stages:
            first_token_s = stages["first_token"] / 1e3
            self._of(self._first_token, place).observe(first_token_s)
            if predicted_ms := active.predicted_ms:
                error = stages["first_token"] / predicted_ms
                self._of(self._prediction_error, place).observe(error)
        self._observe_handoff(stages)

    def _of(self, metric: Counter | Gauge | Histogram, *labels: str) -> Any:
        """Return the series of a metric; the library's own search for it takes 4 µs."""
        key = metric, *labels
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = metric.labels(self._model, *labels)
        return series

    def _observe_handoff(self, stages_ms: Mapping[str, float]) -> None:
        kind = course(stages_ms)
        if kind == "local":
            return
        for stage in HANDOFF_STAGES:
            # The first step after a handoff that was given up is not the handoff's.
            if stage in stages_ms and (kind == "remote" or stage != "first_step"):
                self._stages.labels(self._model, stage).observe(stages_ms[stage] / 1e3)
        for interval, ms in intervals_ms(stages_ms).items():
            self._intervals.labels(self._model, interval).observe(ms / 1e3)

    def handoff_admitted(self) -> None:
        self._handoffs.labels(self._model, "admitted").inc()

    def handoff_closed(self, cause: CloseCause) -> None:
        """Count a remote prefill that was given up."""
        self._handoffs.labels(self._model, _END_OF.get(cause, cause)).inc()

    def excluded(self, num_instances: int) -> None:
        self._of(self._excluded).set(num_instances)

    def queued(self, depth: QueueDepth | None) -> None:
        """Record the depth of the queue; None without a prefill worker, when it is not read.

        The count of dead letters then stays: its change is an alert.
        """
        self._jobs.labels(self._model, "waiting").set(depth.num_jobs if depth else 0)
        self._jobs.labels(self._model, "in_progress").set(depth.num_in_progress if depth else 0)
        self._queued_tokens.labels(self._model).set(depth.num_tokens if depth else 0)
        if depth is not None:
            self._jobs.labels(self._model, "dead").set(depth.num_dead)

    def targets(self, disagg: DisaggConfig) -> None:
        """Record the targets in force; a target that is not set has no series."""
        if disagg is self._aims:
            return
        self._aims = disagg
        for target, ms in (("ttft", disagg.ttft_target_ms), ("itl", disagg.itl_target_ms)):
            if ms is not None:
                self._targets.labels(self._model, target).set(ms / 1e3)
            else:
                with contextlib.suppress(KeyError):
                    self._targets.remove(self._model, target)

    def mismatched(self, prefill_instance: str) -> None:
        """Count a landed block of that prefill worker with a wrong checksum."""
        self._mismatches.labels(self._model, prefill_instance).inc()

    def dropped(self, cause: DropCause, count: int) -> None:
        self._dropped.labels(self._model, cause).inc(count)

    def loaded(self, load: LoadStats) -> None:
        """Record the engine's load."""
        self._of(self._blocks, "total").set(load.num_blocks)
        self._of(self._blocks, "free").set(load.num_free_blocks)
        self._of(self._blocks, "cached").set(load.num_cached_blocks)
        self._of(self._sequences, "running").set(load.num_running)
        self._of(self._sequences, "waiting").set(load.num_waiting)
        self._of(self._blocks, "quarantined").set(load.num_quarantined_blocks)
        self._of(self._sequences, "remote").set(load.num_remote)
        self._of(self._preemptions).inc(load.num_preemptions - self._num_preemptions)
        self._num_preemptions = load.num_preemptions
