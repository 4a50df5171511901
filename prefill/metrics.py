"""Prometheus metrics of a prefill worker."""

from tandem.runtime.messages import LoadReport
from tandem.runtime.metrics import counter, gauge


class PrefillMetrics:
    """Counts of jobs by how they ended, of prompt tokens by source, and the pool's state."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._jobs = counter("prefill_jobs_total", "Tickets by how they ended", ["model", "end"])
        self._tokens = counter(
            "prefill_tokens_total", "Prompt tokens by where their KV came from", ["model", "source"]
        )
        self._blocks = gauge("prefill_kv_blocks", "KV blocks by state", ["model", "state"])

    def job_ended(self, end: str) -> None:
        """`end`: delivered, failed, or why it was not begun (stale, cancelled, expired, ...)."""
        self._jobs.labels(self._model, end).inc()

    def computed(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._tokens.labels(self._model, "computed").inc(num_tokens - num_cached_tokens)
        self._tokens.labels(self._model, "cached").inc(num_cached_tokens)

    def loaded(self, load: LoadReport) -> None:
        self._blocks.labels(self._model, "total").set(load.num_blocks)
        self._blocks.labels(self._model, "free").set(load.num_free_blocks)
        self._blocks.labels(self._model, "cached").set(load.num_cached_blocks)
