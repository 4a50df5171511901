"""What the frontend counts, under Prometheus names.

Histograms are our own: an observation is a bisection and an addition, cheap enough per token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

_PREFIX = "tandem_frontend_"
# 1, 2, 5 per decade
_SECONDS = tuple(m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5))
_TOKENS = tuple(float(2**power) for power in range(18))


class HistogramChild:
    """The observations under one set of labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class Histogram(Collector):
    """A histogram by model."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = _PREFIX + name
        self._text = text
        self._bounds = bounds
        self._children: dict[str, HistogramChild] = {}
        registry.register(self)

    def of(self, model: str) -> HistogramChild:
        """The observations of one model."""
        child = self._children.get(model)
        if child is None:
            child = self._children[model] = HistogramChild(self._bounds)
        return child

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The whole histogram, cumulated as Prometheus reads it."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model"])
        for model, child in self._children.items():
            buckets, cumulated = [], 0
            for bound, count in zip((*self._bounds, None), child.counts, strict=True):
                cumulated += count
                buckets.append(("+Inf" if bound is None else f"{bound:g}", float(cumulated)))
            family.add_metric([model], buckets, child.total)
        yield family


class FrontendMetrics:
    """All metrics of one frontend, with their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests answered.", ["model", "endpoint", "status"]
        )
        self.inflight = self._gauge("inflight_requests", "Requests being answered.")
        self.prefills = self._counter(
            "prefill", "Sequences by where their prompt was computed.", ["model", "place"]
        )
        self.disconnects = self._counter(
            "disconnected_clients", "Clients that left before the answer's end.", ["model"]
        )
        self.migrations = self._counter(
            "migrations",
            "Sequences sent to another worker, before (new_request) or after (ongoing) a token.",
            ["model", "kind"],
        )
        self.migration_gap = Histogram(
            "migration_gap_seconds",
            "From the last token of a worker that was lost to the next one of another.",
            _SECONDS,
            registry,
        )
        self.workers = self._gauge("decode_workers", "Decode workers that can be routed to.")
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS, registry
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds",
            "Between tokens of a sequence; tokens that come together share their gap.",
            _SECONDS,
            registry,
        )
        self.duration = Histogram(
            "request_duration_seconds", "From arrival to the last byte.", _SECONDS, registry
        )
        self.input_tokens = Histogram(
            "input_sequence_tokens", "Prompt tokens of a request.", _TOKENS, registry
        )
        self.output_tokens = Histogram(
            "output_sequence_tokens", "Generated tokens of a request.", _TOKENS, registry
        )
        self.cached_tokens = Histogram(
            "cached_tokens",
            "Prompt tokens of a request found in a prefix cache.",
            _TOKENS,
            registry,
        )
        self._counters: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._inflight: dict[str, Gauge] = {}

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, ["model"], registry=self.registry)

    def count(self, counter: Counter, *labels: str) -> None:
        """Add one under these labels."""
        bound = self._counters.get((counter, labels))
        if bound is None:
            bound = self._counters[counter, labels] = counter.labels(*labels)
        bound.inc()

    def add_inflight(self, model: str, change: int) -> None:
        """A request came (1) or ended (-1)."""
        bound = self._inflight.get(model)
        if bound is None:
            bound = self._inflight[model] = self.inflight.labels(model)
        bound.inc(change)

    def set_workers(self, num_workers: dict[str, int]) -> None:
        """How many decode workers each model has now."""
        self.workers.clear()
        for model, num in num_workers.items():
            self.workers.labels(model).set(num)

    def render(self) -> bytes:
        """These metrics and the process's, in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)
