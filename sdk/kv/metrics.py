"""A worker's load as its author measures it, for custom routers and for frontends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from tandem.runtime.bus.events import load_subject
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.bounds import MAX_COUNT, Amount, Count, Message, Name
from tandem.runtime.wire.cluster_messages import LoadReport
from tandem.runtime.wire.messages import encode
from tandem.sdk.worker.changes import Changes
from tandem.sdk.worker.distributed_runtime import Component, Endpoint

logger = logging.getLogger(__name__)

METRICS_ENDPOINT = "load_metrics"
_PAUSE_S = 0.01


class KvMetrics(Message, frozen=True, tag=False, omit_defaults=False):
    """One worker's load; `worker_id` is an instance id for `Client.direct`."""

    worker_id: Name
    request_active_slots: Count = 0
    request_total_slots: Count = 0
    kv_active_blocks: Count = 0
    kv_total_blocks: Count = 0
    num_requests_waiting: Count = 0
    gpu_cache_usage_perc: Amount = 0.0  # 0 .. 1
    gpu_prefix_cache_hit_rate: Amount = 0.0  # 0 .. 1


def metrics_subject(component: Component, instance_id: str = "*") -> str:
    """Return the subject of an instance's KvMetrics, by default of all instances."""
    return f"tandem.{component.namespace}.metrics.{component.name}.{instance_id}"


class MetricsSource:
    """The base of the publishers: it reports a worker's KvMetrics and answers `load_metrics`.

    A report follows each change, and at least one a second, also to frontends. Before the first
    `publish` a worker has no metrics.
    """

    def __init__(self) -> None:
        self._make: Callable[[str], KvMetrics] | None = None  # of our worker id
        self._component: Component | None = None
        self._changes = Changes()
        self._opening: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    def create_endpoint(
        self, component: Component | Endpoint, lease: object = None
    ) -> Awaitable[None]:
        """Report from now on as a worker of `component`, and serve `load_metrics` there.

        Call it on the event loop, once. Awaiting the result waits until the endpoint is in
        discovery. `lease` is ignored.
        """
        if self._opening is not None:
            raise InvalidRequestError("create_endpoint: called already", param="component")
        if isinstance(component, Endpoint):
            address = component.address
            component = Component(component.runtime, address.namespace, address.component)
        self._component = component
        self._reporting = asyncio.create_task(self._report(component))
        self._opening = asyncio.create_task(self._open(component))
        self._opening.add_done_callback(_log_failure)
        return self._opening

    async def close(self) -> None:
        """Stop reporting and answering."""
        await cancel(self._opening)
        await cancel(self._reporting)
        if self._component is not None:
            endpoint = self._component.endpoint(METRICS_ENDPOINT)
            await endpoint.withdraw()
            served = self._component.runtime.served.pop(endpoint.address, None)
            if served is not None:
                await served.drain(0.0)

    def _changed(self, make: Callable[[str], KvMetrics]) -> None:
        """Report the result of `make(worker_id)`; from any thread."""
        self._make = make
        self._changes.note()

    async def _open(self, component: Component) -> None:
        endpoint = component.endpoint(METRICS_ENDPOINT)

        async def load_metrics(_request: object) -> object:
            if self._make is None:
                raise UnavailableError(f"{component.runtime.instance_id} has not published any")
            return msgspec.to_builtins(self._make(component.runtime.instance_id))

        endpoint.serve(load_metrics)
        await endpoint.register()

    async def _report(self, component: Component) -> None:
        runtime = component.runtime
        async for _ in self._changes.reports(_PAUSE_S):
            if runtime.is_ending:
                return
            if self._make is not None:
                metrics = self._make(runtime.instance_id)
                subject = metrics_subject(component, metrics.worker_id)
                runtime.events.publish(subject, encode(metrics))
                subject = load_subject(component.namespace, metrics.worker_id)
                runtime.events.publish(subject, encode(_load_report(metrics, runtime.epoch)))


class KvMetricsPublisher(MetricsSource):
    """A publisher of a worker's load, as its author measures it."""

    def publish(
        self,
        request_active_slots: int,
        request_total_slots: int,
        kv_active_blocks: int,
        kv_total_blocks: int,
        num_requests_waiting: int,
        gpu_cache_usage_perc: float,
        gpu_prefix_cache_hit_rate: float,
    ) -> None:
        """Publish the worker's current load, from any thread, at any rate. Does not wait.

        Raise InvalidRequestError naming an argument that is not a number from 0 up, or has no end.
        """
        numbers = (
            request_active_slots,
            request_total_slots,
            kv_active_blocks,
            kv_total_blocks,
            num_requests_waiting,
            gpu_cache_usage_perc,
            gpu_prefix_cache_hit_rate,
        )
        for name, value in zip(KvMetrics.__struct_fields__[1:], numbers, strict=True):
            kind = (int, float) if name.startswith("gpu_") else (int,)
            if not isinstance(value, kind) or not 0 <= value <= MAX_COUNT:
                raise InvalidRequestError(
                    f"{name}: {value!r} is not a number from 0 up", param=name
                )
        self._changed(lambda worker_id: KvMetrics(worker_id, *numbers))


class WorkerMetricsPublisher(MetricsSource):
    """A publisher of the KV blocks that a worker uses, by data-parallel rank."""

    def __init__(self) -> None:
        super().__init__()
        self._used_blocks: dict[int, int] = {}

    def publish(
        self,
        dp_rank: int | None = None,
        active_decode_blocks: int | None = None,
        kv_used_blocks: int | None = None,
    ) -> None:
        """Publish a rank's blocks: those of running requests or, if given, all in use."""
        used = active_decode_blocks if kv_used_blocks is None else kv_used_blocks
        if used is None or not 0 <= used <= MAX_COUNT:
            name = "kv_used_blocks" if kv_used_blocks is not None else "active_decode_blocks"
            raise InvalidRequestError(f"{name}: {used!r} is not a number from 0 up", param=name)
        self._used_blocks[dp_rank or 0] = used
        total = min(sum(self._used_blocks.values()), MAX_COUNT)
        self._changed(lambda worker_id: KvMetrics(worker_id, kv_active_blocks=total))


def _load_report(metrics: KvMetrics, epoch: str) -> LoadReport:
    num_blocks = metrics.kv_total_blocks or metrics.kv_active_blocks
    return LoadReport(
        instance_id=metrics.worker_id,
        epoch=epoch,
        role="decode",
        num_running=metrics.request_active_slots,
        num_waiting=metrics.num_requests_waiting,
        num_waiting_tokens=0,
        num_blocks=num_blocks,
        num_free_blocks=max(0, num_blocks - metrics.kv_active_blocks),
        num_cached_blocks=0,
    )


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s cannot be served: %s", METRICS_ENDPOINT, task.exception())
