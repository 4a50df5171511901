"""The contract between an engine and the worker around it."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

from tandem.sdk.engine.metrics import EngineMetrics, SnapshotPublisher
from tandem.sdk.engine.types import EngineConfig, GenerateChunk, GenerateRequest
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.kv.sources import KvEventSource
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.distributed_runtime import Endpoint


class LLMEngine(ABC):
    """An inference engine; `tandem.sdk.engine.run` makes a worker of it.

    The order of calls: `from_args`, `start`, then any number of `generate` at once with `abort`
    between them, then `drain`, `is_quiescent`, `cleanup`. The constructor is cheap and takes
    nothing that has to be given back; all that is heavy belongs into `start`. Everything is called
    on the event loop's thread, so nothing here may block.
    """

    @classmethod
    @abstractmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """The engine, not started, and how its worker presents it; None is `sys.argv[1:]`."""

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Loads and warms up. On return `generate` is ready for concurrent calls.

        `worker_id` is unique in the cluster and stands for as long as this process runs. After an
        error here `cleanup` is called, and the process ends with status 1.
        """

    @abstractmethod
    def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yields the answer to one request; write it as `async def` with `yield`.

        Ask `context.is_stopped()` between chunks, and when it is true end with a chunk of finish
        reason `cancelled`. What must be released however the stream ends belongs into
        `try/finally` here, not into `abort`. Errors of `tandem.sdk.exceptions` reach the caller as
        they are, others as Unknown; GeneratorExit and StreamIncomplete let another worker go on.
        """

    async def abort(self, context: Context) -> None:
        """Called once when the caller cancels or goes away; `context.id()` says which request.

        Not called for a request that ended by itself.
        """

    async def drain(self) -> None:
        """Called once at the end, when no request runs any more and the cluster is still there.

        Return when nobody reads this engine's KV cache any more.
        """

    async def is_quiescent(self) -> bool | None:
        """Whether no transfer of this engine's KV cache is under way; None where it cannot tell.

        Asked of prefill engines at the end, until it is True or the time is up.
        """
        return None

    @abstractmethod
    async def cleanup(self) -> None:
        """Releases everything. Called after `start`, also when it failed halfway.

        A second call does nothing, and so does a call on an engine that was never started.
        """

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        """Where changes of the prefix cache come from, one per data-parallel rank; none here.

        Asked once, after `start`. Needs `EngineConfig.kv_cache_block_size`. An engine that pushes
        from a thread ends the thread in `cleanup`.
        """
        return []

    def component_metrics_dp_ranks(self) -> list[int]:
        """The data-parallel ranks that this engine publishes snapshots for; none here."""
        return []

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        """Hands over where snapshots go, once, if there are ranks for it. Any thread may use it."""

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        """Adds the engine's own Prometheus metrics to the worker's /metrics."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """The request that an idle worker checks this engine with; None is no check.

        `tandem.sdk.engine.health_check.build_health_check_payload` makes one.
        """
        return None

    def supported_controls(self) -> set[str]:
        """The names that `engine_control` knows; each is POST /engine/control/NAME."""
        return set()

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Does what the operator asks of the running engine; the answer goes back as JSON."""
        return {"status": "error", "message": f"unsupported engine control: {control}"}

    def supported_updates(self) -> set[str]:
        """The names that `engine_update` knows; each is POST /engine/update/NAME."""
        return set()

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """Changes what the engine has loaded; the answer goes back as JSON."""
        return {"status": "error", "message": f"unsupported engine update: {update}"}

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        """Hands over the endpoint that this engine is served at, once, before it is known."""
