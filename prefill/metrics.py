"""Prometheus metrics of a prefill worker."""

import contextlib
from typing import TYPE_CHECKING

from tandem.runtime.process.metrics import counter, gauge
from tandem.runtime.wire.cluster_messages import LinkReport

if TYPE_CHECKING:
    from tandem.engine.schedule.outputs import LoadStats


class PrefillMetrics:
    """Counts of jobs by outcome and of prompt tokens by source; the state of the pool."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._jobs = counter("prefill_jobs_total", "Tickets by how they ended", ["model", "end"])
        self._tokens = counter(
            "prefill_tokens_total", "Prompt tokens by where their KV came from", ["model", "source"]
        )
        self._writes = counter(
            "prefill_writes_total", "Writes to decode workers by outcome", ["model", "outcome"]
        )
        for outcome in ("completed", "failed"):
            self._writes.labels(model, outcome)
        self._written_bytes = counter(
            "prefill_written_bytes_total", "KV written into decode workers", ["model"]
        )
        self._links = gauge(
            "prefill_link_bytes_per_second",
            "Rate of writes to a decode worker, measured when they met",
            ["model", "decode_instance"],
        )
        self._blocks = gauge("prefill_kv_blocks", "KV blocks by state", ["model", "state"])

    def job_ended(self, end: str) -> None:
        """Count a job. `end`: delivered, failed, or the cause of its refusal (stale, ...)."""
        self._jobs.labels(self._model, end).inc()

    def computed(self, num_tokens: int, num_cached_tokens: int, num_pulled_tokens: int) -> None:
        """Count a prompt's tokens; those READ from its decode worker are among the cached ones."""
        self._tokens.labels(self._model, "computed").inc(num_tokens - num_cached_tokens)
        num_pulled_tokens = min(num_pulled_tokens, num_cached_tokens)
        self._tokens.labels(self._model, "pulled").inc(num_pulled_tokens)
        self._tokens.labels(self._model, "cached").inc(num_cached_tokens - num_pulled_tokens)

    def written(self, num_bytes: int | None) -> None:
        """Count a write that is in a decode worker's memory; None is one that failed."""
        if num_bytes is None:
            self._writes.labels(self._model, "failed").inc()
            return
        self._writes.labels(self._model, "completed").inc()
        self._written_bytes.labels(self._model).inc(num_bytes)

    def link_measured(self, link: LinkReport) -> None:
        self._links.labels(self._model, link.decode_instance).set(link.write_bytes_per_s)

    def link_gone(self, decode_instance: str) -> None:
        with contextlib.suppress(KeyError):
            self._links.remove(self._model, decode_instance)

    def loaded(self, load: "LoadStats") -> None:
        self._blocks.labels(self._model, "total").set(load.num_blocks)
        self._blocks.labels(self._model, "free").set(load.num_free_blocks)
        self._blocks.labels(self._model, "cached").set(load.num_cached_blocks)
