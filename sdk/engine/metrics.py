"""The metrics of an engine's worker, and those that the engine adds."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.registry import Collector

from tandem.runtime.process.metrics import gauge
from tandem.sdk.engine.types import ComponentSnapshot

logger = logging.getLogger(__name__)

ENGINE_LABELS = ("namespace", "component", "endpoint", "worker_id", "model")


class EngineGauges:
    """The metrics that every engine's worker has."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = [labels[name] for name in ENGINE_LABELS]
        self.model_load_time = gauge(
            "component_model_load_time_seconds", "Duration of the engine's start.", ENGINE_LABELS
        )
        self.drain_time = gauge(
            "component_drain_time_seconds",
            "Duration of the engine's drain at the end.",
            ENGINE_LABELS,
        )
        self.cleanup_time = gauge(
            "component_cleanup_time_seconds", "Duration of the engine's cleanup.", ENGINE_LABELS
        )
        self.total_blocks = gauge(
            "component_total_blocks", "KV blocks of a rank.", (*ENGINE_LABELS, "dp_rank")
        )
        self.cache_usage = gauge(
            "component_gpu_cache_usage_percent",
            "Part of a rank's KV blocks that is in use, 0 to 1.",
            (*ENGINE_LABELS, "dp_rank"),
        )
        self.hit_rate = gauge(
            "component_kv_cache_hit_rate",
            "Part of the prompts found in a rank's prefix cache, 0 to 1.",
            (*ENGINE_LABELS, "dp_rank"),
        )

    def loaded(self, duration_s: float) -> None:
        self.model_load_time.labels(*self._labels).set(duration_s)

    def drained(self, duration_s: float) -> None:
        self.drain_time.labels(*self._labels).set(duration_s)

    def cleaned_up(self, duration_s: float) -> None:
        self.cleanup_time.labels(*self._labels).set(duration_s)

    def seen(self, snapshot: ComponentSnapshot, dp_rank: int) -> None:
        labels = (*self._labels, str(dp_rank))
        self.total_blocks.labels(*labels).set(snapshot.kv_total_blocks)
        self.cache_usage.labels(*labels).set(snapshot.gpu_cache_usage)
        if snapshot.kv_cache_hit_rate is not None:
            self.hit_rate.labels(*labels).set(snapshot.kv_cache_hit_rate)


class SnapshotPublisher:
    """The publisher of an engine's KV cache state, for any thread."""

    def __init__(
        self, gauges: EngineGauges, dp_ranks: Sequence[int], changed: Callable[[], None]
    ) -> None:
        self._gauges = gauges
        self._changed = changed
        self._dp_ranks = frozenset(dp_ranks)
        self.latest: dict[int, ComponentSnapshot] = {}  # by rank
        self._refused: set[str] = set()  # reasons that are in the log; they name fields alone

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        """Put the snapshot into the metrics and the load reports.

        A number that no engine can have, as of a counter that went below 0, ends neither the
        engine nor the choice among workers: the last snapshot stays, and the log names the field
        once. Raise ValueError for a rank that is not in `component_metrics_dp_ranks`.
        """
        if rank not in self._dp_ranks:
            known = sorted(self._dp_ranks)
            raise ValueError(f"rank {rank} is not in component_metrics_dp_ranks(): {known}")
        try:
            msgspec.convert(msgspec.to_builtins(snapshot), ComponentSnapshot)
        except (msgspec.ValidationError, TypeError) as error:
            self._refuse(f"the load of rank {rank} is not published: {error}")
            return
        self.latest[rank] = snapshot
        self._gauges.seen(snapshot, rank)
        self._changed()

    def _refuse(self, reason: str) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            logger.error("%s", reason)


@dataclass(frozen=True, slots=True)
class _Source:
    """A part of a registry, chosen by the prefixes of its metrics' names."""

    registry: Collector
    prefixes: tuple[str, ...]
    excluded: tuple[str, ...]

    def takes(self, name: str) -> bool:
        return name.startswith(self.prefixes) and not name.startswith(self.excluded)


class EngineMetrics(Collector):
    """The metrics of one worker; `auto_labels` are added to those of its engine."""

    def __init__(self, auto_labels: Mapping[str, str]) -> None:
        self.auto_labels = dict(auto_labels)
        self._sources: list[_Source] = []
        self._texts: list[Callable[[], str]] = []

    def register_registry(
        self,
        registry: Collector,
        *,
        prefix_filters: Sequence[str] | None = None,
        exclude_prefixes: Sequence[str] | None = None,
    ) -> None:
        """Add the metrics of a registry whose names begin with one of `prefix_filters`."""
        prefixes = ("",) if prefix_filters is None else tuple(prefix_filters)
        self._sources.append(_Source(registry, prefixes, tuple(exclude_prefixes or ())))

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Add the text of `callback`, in Prometheus' text format, to every scrape."""
        self._texts.append(callback)

    def render(self) -> bytes:
        """Return all metrics of this process in Prometheus' text format."""
        parts = [generate_latest(self)]
        for text in self._texts:
            try:
                parts.append(text().encode())
            except Exception:
                logger.exception("a metrics callback of the engine failed")
        return b"".join(parts)

    def collect(self) -> Iterator[Metric]:
        """Yield the process's own metrics, then those of the sources, with `auto_labels`."""
        shared = [source for source in self._sources if source.registry is REGISTRY]
        for family in REGISTRY.collect():
            if not any(source.takes(family.name) for source in shared):
                yield family
        for source in self._sources:
            for family in source.registry.collect():
                if source.takes(family.name):
                    yield self._labelled(family)

    def _labelled(self, family: Metric) -> Metric:
        """Return the family with `auto_labels`, which never replace a label."""
        labelled = Metric(family.name, family.documentation, family.type, family.unit)
        labelled.samples = [
            sample._replace(labels={**self.auto_labels, **sample.labels})
            for sample in family.samples
        ]
        return labelled


def register_engine_registry(
    metrics: EngineMetrics,
    registry: Collector,
    *,
    prefix_filters: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
) -> None:
    """Add a registry of the engine to the worker's /metrics."""
    metrics.register_registry(
        registry, prefix_filters=prefix_filters, exclude_prefixes=exclude_prefixes
    )


def register_global_registry(
    metrics: EngineMetrics,
    *,
    engine_prefix: str,
    multiproc_only_prefixes: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
) -> None:
    """Add the worker's labels to the engine's metrics in Prometheus' default registry.

    `engine_prefix` begins their names, as `vllm:`.
    """
    prefixes = [engine_prefix, *(multiproc_only_prefixes or ())]
    metrics.register_registry(REGISTRY, prefix_filters=prefixes, exclude_prefixes=exclude_prefixes)
