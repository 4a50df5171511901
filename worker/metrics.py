"""Prometheus metrics of every worker, whatever its roles: the engine's load."""

from tandem.engine.outputs import LoadStats
from tandem.runtime.metrics import gateway_gauge, gauge

_GATEWAY_LABELS = ("model_name", "engine")
_ENGINE = "0"  # the index of a vLLM server's engine


class WorkerMetrics:
    """The prompt tokens in hand, and the engine's load under the names of vLLM's metrics."""

    def __init__(self, model: str, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = gauge(
            "worker_prompt_tokens", "Prompt tokens not yet computed, by state", ["model", "state"]
        )
        self._gateway_running = gateway_gauge(
            "num_requests_running", "Sequences that are computed", _GATEWAY_LABELS
        )
        self._gateway_waiting = gateway_gauge(
            "num_requests_waiting", "Sequences that wait", _GATEWAY_LABELS
        )
        self._gateway_usage = gateway_gauge(
            "kv_cache_usage_perc", "Part of the KV blocks that is in use", _GATEWAY_LABELS
        )
        self._gateway_old_usage = gateway_gauge(
            "gpu_cache_usage_perc", "The former name of kv_cache_usage_perc", _GATEWAY_LABELS
        )
        self._gateway_cache = gateway_gauge(
            "cache_config_info",
            "The size of the KV pool",
            ["block_size", "num_gpu_blocks", *_GATEWAY_LABELS],
        )
        self._model = model

    def loaded(self, load: LoadStats) -> None:
        """Record the engine's load; as in vLLM, a sequence in remote prefill waits."""
        for state, num_tokens in (
            ("running", load.num_running_prompt_tokens),
            ("waiting", load.num_waiting_prompt_tokens),
            ("remote", load.num_remote_prompt_tokens),
        ):
            self._tokens.labels(self._model, state).set(num_tokens)
        labels = self._model, _ENGINE
        self._gateway_running.labels(*labels).set(load.num_running)
        self._gateway_waiting.labels(*labels).set(load.num_waiting + load.num_remote)
        usage = 1 - (load.num_free_blocks + load.num_cached_blocks) / load.num_blocks
        self._gateway_usage.labels(*labels).set(usage)
        self._gateway_old_usage.labels(*labels).set(usage)
        self._gateway_cache.labels(str(self._block_size), str(load.num_blocks), *labels).set(1)
