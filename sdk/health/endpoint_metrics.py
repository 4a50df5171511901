"""Counts of each served endpoint, as plain numbers that Prometheus collects."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Literal

from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge"]

ENDPOINT_LABELS = ("endpoint",)
ENDPOINT_FAMILIES: dict[str, tuple[Kind, str]] = {
    "tandem_endpoint_requests_total": ("counter", "Requests whose handler has ended."),
    "tandem_endpoint_failures_total": ("counter", "Requests whose handler raised."),
    "tandem_endpoint_seconds_total": ("counter", "Time spent in the handler."),
    "tandem_endpoint_running": ("gauge", "Requests in hand."),
}


class EndpointCounts:
    """Counts of one endpoint of this process; `labels` are the author's."""

    def __init__(self, endpoint: str, labels: Sequence[tuple[str, str]] = ()) -> None:
        self.labels = {"endpoint": endpoint, **dict(labels)}
        self.num_requests = 0
        self.num_failed = 0
        self.num_running = 0
        self.seconds = 0.0
        _collector.watch(self)

    def values(self) -> Iterable[float]:
        """Return the counts in the order of ENDPOINT_FAMILIES."""
        return self.num_requests, self.num_failed, self.seconds, self.num_running


class _EndpointCollector(Collector):
    """The endpoints that still exist, each with its own labels."""

    def __init__(self) -> None:
        self._counts: weakref.WeakSet[EndpointCounts] = weakref.WeakSet()
        self._is_registered = False

    def watch(self, counts: EndpointCounts) -> None:
        self._counts.add(counts)
        if not self._is_registered:
            self._is_registered = True
            REGISTRY.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return the families, without a sample."""
        return [
            Metric(name.removesuffix("_total"), text, kind)
            for name, (kind, text) in ENDPOINT_FAMILIES.items()
        ]

    def collect(self) -> Iterable[Metric]:
        families = list(self.describe())
        for counts in list(self._counts):
            for family, name, value in zip(
                families, ENDPOINT_FAMILIES, counts.values(), strict=True
            ):
                family.add_sample(name, counts.labels, value)
        return families


_collector = _EndpointCollector()
