"""The contract between an engine and its worker."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

from tandem.runtime.errors import InvalidRequestError
from tandem.sdk.engine.metrics import EngineMetrics, SnapshotPublisher
from tandem.sdk.engine.types import (
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    VectorRequest,
)
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.kv.sources import KvEventSource
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.distributed_runtime import Endpoint


class LLMEngine(ABC):
    """An inference engine; `tandem.sdk.engine_worker.run` serves it as a worker.

    The order of calls: `from_args`, `start`, any number of concurrent `generate` and `abort`, then
    `drain`, `is_quiescent`, `cleanup`. The constructor is cheap and acquires nothing; `start` loads
    and acquires. All methods are called on the event loop's thread and must not block it.
    """

    @classmethod
    @abstractmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Return the engine, not started, and its worker's config. None is `sys.argv[1:]`."""

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Load and warm up. On return `generate` is ready for concurrent calls.

        `worker_id` is unique in the cluster and valid as long as this process runs. After an error
        `cleanup` is called, and the process ends with status 1.
        """

    @abstractmethod
    def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the answer to one request; write it as `async def` with `yield`.

        Check `context.is_stopped()` between chunks; when it is true, end with a chunk of finish
        reason `cancelled`. Release resources in `try/finally` here, not in `abort`. Errors of
        `tandem.sdk.exceptions` reach the caller as they are, others as Unknown. After GeneratorExit
        and StreamIncomplete another worker resumes the answer.
        """

    async def embed(self, request: VectorRequest, context: Context) -> Sequence[Sequence[float]]:
        """Return the vector of each text of `request["token_ids"]`, in their order.

        For the endpoint type `embeddings`. Cancelled when its caller leaves.
        """
        raise InvalidRequestError("this engine makes no embeddings", param="model")

    async def score(self, request: VectorRequest, context: Context) -> Sequence[float]:
        """Return the score of each pair of `request["token_ids"]`; the higher, the more relevant.

        For the endpoint type `rerank`. Cancelled when its caller leaves.
        """
        raise InvalidRequestError("this engine scores no pairs", param="model")

    async def abort(self, context: Context) -> None:
        """Give up request `context.id()`. Called once when its caller cancels or leaves.

        Not called for a request that ended by itself.
        """

    async def drain(self) -> None:
        """Wait until this engine's KV cache is read no more.

        Called once at the end: no request is running, and NATS and etcd are still connected.
        """

    async def is_quiescent(self) -> bool | None:
        """Return True if no transfer of this engine's KV cache is under way, None if unknown.

        Called repeatedly for prefill engines at the end, until it is True or the time is up.
        """
        return None

    @abstractmethod
    async def cleanup(self) -> None:
        """Release everything. Called after `start`, also after one that failed.

        Do nothing in a second call, and for an engine that was never started.
        """

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        """Return the sources of prefix cache changes, one per data-parallel rank; none here.

        Called once, after `start`. Needs `EngineConfig.kv_cache_block_size`. An engine that pushes
        from a thread ends the thread in `cleanup`.
        """
        return []

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the data-parallel ranks that publish snapshots; none here."""
        return []

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        """Keep `publisher`, which any thread may use. Called once, if there are ranks for it."""

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        """Add the engine's own Prometheus metrics to the worker's /metrics."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return the request by which an idle worker checks this engine; None disables the check.

        `tandem.sdk.engine.health_check.build_health_check_payload` makes one.
        """
        return None

    def supported_controls(self) -> set[str]:
        """Return the names for `engine_control`; each is POST /engine/control/NAME."""
        return set()

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Run an operator's command on the running engine. Return its answer, a JSON object."""
        return {"status": "error", "message": f"unsupported engine control: {control}"}

    def supported_updates(self) -> set[str]:
        """Return the names for `engine_update`; each is POST /engine/update/NAME."""
        return set()

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """Change the loaded parts of the engine. Return the answer, a JSON object."""
        return {"status": "error", "message": f"unsupported engine update: {update}"}

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        """Keep the endpoint of this engine. Called once, before it is in discovery."""
