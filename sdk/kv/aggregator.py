"""The load of all workers of a component, for custom routers."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ProtocolError, TandemError
from tandem.runtime.store.discovery import watch_endpoint
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import RefusalLog, decoder
from tandem.sdk.kv.metrics import METRICS_ENDPOINT, KvMetrics, metrics_subject
from tandem.sdk.wire.values import encode_call
from tandem.sdk.worker.distributed_runtime import Component

logger = logging.getLogger(__name__)

_STALE_S = 3.0  # after this long without a report a worker is asked
_ASK_TIMEOUT_S = 1.0
_decode_metrics = decoder(KvMetrics)
_refusals = RefusalLog(logger, "the metrics")


@dataclass(frozen=True, slots=True)
class AggregatedMetrics:
    """The load of every worker that reports it."""

    endpoints: list[KvMetrics] = field(default_factory=list)


class KvMetricsAggregator:
    """A collector of the KvMetrics of all workers of a component, active once constructed.

    Construct it on the event loop; `close` stops it.
    """

    def __init__(self, component: Component) -> None:
        self._component = component
        self._runtime = component.runtime
        self._address = component.endpoint(METRICS_ENDPOINT).address
        self._latest: dict[str, tuple[float, KvMetrics]] = {}  # worker |-> (time, metrics)
        self._view = watch_endpoint(self._runtime.discovery, self._address)
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._view.close)
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def get_metrics(self) -> AggregatedMetrics:
        """Return the latest metrics of every worker, ordered by worker id.

        A worker without a recent report is asked; one that does not answer is left out.
        """
        await asyncio.shield(self._starting)
        now_s = time.perf_counter()
        silent = [
            instance
            for instance_id, instance in self._view.items.items()
            if instance_id not in self._latest or now_s - self._latest[instance_id][0] > _STALE_S
        ]
        await asyncio.gather(*(self._ask(instance) for instance in silent))
        present = sorted(self._view.items.keys() & self._latest.keys())
        return AggregatedMetrics([self._latest[instance_id][1] for instance_id in present])

    async def close(self) -> None:
        """Stop listening."""
        await cancel(self._starting)
        await self._stack.aclose()

    async def _start(self) -> None:
        subject, events = metrics_subject(self._component), self._runtime.events
        self._stack.push_async_callback(await events.subscribe(subject, self._on_metrics))
        self._view.subscribe(self._on_instance)
        await self._view.ready()

    def _on_instance(self, instance_id: str, instance: Instance | None) -> None:
        if instance is None:
            self._latest.pop(instance_id, None)

    def _on_metrics(self, subject: str, payload: bytes) -> None:
        try:
            metrics = _decode_metrics(payload)
        except ProtocolError as error:
            _refusals.note(subject, error)
            return
        if metrics.worker_id in self._view.items:
            self._latest[metrics.worker_id] = (time.perf_counter(), metrics)

    async def _ask(self, instance: Instance) -> None:
        try:
            async with RequestContext(timeout_s=_ASK_TIMEOUT_S) as context:
                answer = await self._runtime.client.call(
                    instance.address, str(self._address), encode_call(None), context
                )
            self._latest[instance.instance_id] = (time.perf_counter(), _decode_metrics(answer))
        except TandemError as error:
            self._latest.pop(instance.instance_id, None)
            logger.info("no metrics of %s: %s", instance.instance_id, error)
