"""The statistics of vLLM's scheduler: its load, and the places of prompts."""

from typing import Any

import msgspec
from vllm.v1.metrics.loggers import StatLoggerBase

from tandem.runtime.wire.messages import PrefillReport
from tandem.sdk.engine.metrics import SnapshotPublisher
from tandem.sdk.engine.types import ComponentSnapshot


class LoadLogger(StatLoggerBase):  # type: ignore[misc]
    """A logger of vLLM's statistics that publishes the state of the KV cache after each step.

    `reports` gets the place of each prompt in it, before the prompt's first token comes.
    """

    def __init__(self) -> None:
        self.reports: dict[str, PrefillReport | None] = {}
        self._publisher: SnapshotPublisher | None = None
        self._num_blocks = 0
        self._num_queries = 0  # tokens of prompts that were looked up in the prefix cache
        self._num_hits = 0

    def publish_to(self, publisher: SnapshotPublisher, num_blocks: int) -> None:
        """Publish from now on, for a cache of `num_blocks` blocks."""
        self._publisher, self._num_blocks = publisher, num_blocks
        self._publish(0.0)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._num_queries += scheduler_stats.prefix_cache_stats.queries
            self._num_hits += scheduler_stats.prefix_cache_stats.hits
            self._publish(scheduler_stats.kv_cache_usage)
            for name, report in (scheduler_stats.kv_connector_stats or {}).items():
                if name in self.reports:
                    self.reports[name] = msgspec.convert(report, PrefillReport)

    def log_engine_initialized(self) -> None:
        """Do nothing: the worker logs the start."""

    def _publish(self, usage: float) -> None:
        if self._publisher is None:
            return
        hit_rate = self._num_hits / self._num_queries if self._num_queries else None
        num_used = round(usage * self._num_blocks)
        self._publisher.publish(
            0, ComponentSnapshot(num_used, self._num_blocks, usage, 0, hit_rate)
        )
