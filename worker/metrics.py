"""Prometheus metrics of every worker, whatever its roles: the engine's load."""

from collections.abc import Sequence

from prometheus_client import Gauge

from tandem.engine.schedule.outputs import LoadStats
from tandem.runtime.process.metrics import gateway_gauge, gauge

_GATEWAY_LABELS = ("model_name", "engine")
_ENGINE = "0"  # the index of a vLLM server's engine


class WorkerMetrics:
    """The prompt tokens in hand, and the engine's load under the names of vLLM's metrics.

    Workers of emulated devices add how late their host was.
    """

    def __init__(self, model: str, block_size: int, num_ranks: int = 1) -> None:
        self._block_size, self._labels = block_size, (model, _ENGINE)
        tokens = gauge(
            "worker_prompt_tokens", "Prompt tokens not yet computed, by state", ["model", "state"]
        )
        # The series, once: finding them takes longer than setting them, on every report.
        self._running_tokens = tokens.labels(model, "running")
        self._waiting_tokens = tokens.labels(model, "waiting")
        self._remote_tokens = tokens.labels(model, "remote")
        self._late_share = gauge(
            "worker_emulated_late_share",
            "Time by which the host was late, over the time of all emulated steps",
            ["model"],
        )
        self._worst_late = gauge(
            "worker_emulated_worst_late_seconds", "Longest delay of an emulated step", ["model"]
        )
        self._model = model
        self._ranks = gauge("worker_ranks", "Processes that compute the model together", ["model"])
        self._ranks.labels(model).set(num_ranks)
        self._rank_wait = gauge(
            "worker_rank_wait_seconds",
            "Time for which a rank of the model has waited for the others",
            ["model", "rank"],
        )
        self._running = self._gateway_series("num_requests_running", "Sequences that are computed")
        self._waiting = self._gateway_series("num_requests_waiting", "Sequences that wait")
        self._usage = self._gateway_series(
            "kv_cache_usage_perc", "Part of the KV blocks that is in use"
        )
        self._old_usage = self._gateway_series(
            "gpu_cache_usage_perc", "The former name of kv_cache_usage_perc"
        )
        self._cache = gateway_gauge(
            "cache_config_info",
            "The size of the KV pool",
            ["block_size", "num_gpu_blocks", *_GATEWAY_LABELS],
        )

    def _gateway_series(self, name: str, description: str) -> Gauge:
        return gateway_gauge(name, description, _GATEWAY_LABELS).labels(*self._labels)

    def waited(self, waits_s: Sequence[float]) -> None:
        """Record how long each rank has waited for the others."""
        for rank, wait_s in enumerate(waits_s):
            self._rank_wait.labels(self._model, str(rank)).set(wait_s)

    def loaded(self, load: LoadStats) -> None:
        """Record the engine's load; as in vLLM, a sequence in remote prefill waits."""
        self._running_tokens.set(load.num_running_prompt_tokens)
        self._waiting_tokens.set(load.num_waiting_prompt_tokens)
        self._remote_tokens.set(load.num_remote_prompt_tokens)
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting + load.num_remote)
        usage = 1 - (load.num_free_blocks + load.num_cached_blocks) / load.num_blocks
        self._usage.set(usage)
        self._old_usage.set(usage)
        self._cache.labels(str(self._block_size), str(load.num_blocks), *self._labels).set(1)

    def emulated(self, late_share: float, worst_late_s: float) -> None:
        """Record how late the host of an emulated device was since its start."""
        model, _ = self._labels
        self._late_share.labels(model).set(late_share)
        self._worst_late.labels(model).set(worst_late_s)
