"""One worker process: the parts that its role stands on, started and closed in one order."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from tandem.engine.engine import Engine
from tandem.engine.loop import EngineLoop, build_in_thread
from tandem.engine.model_runner import ModelRunner
from tandem.engine.outputs import LoadStats, SequenceOutput
from tandem.engine.step.outcome import DeviceLostError
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.address import EndpointAddress
from tandem.runtime.discovery import register_instance
from tandem.runtime.events import load_subject
from tandem.runtime.lifecycle import Lifecycle, freeze_gc
from tandem.runtime.messages import LinkReport, LoadReport, WorkerStatus, encode
from tandem.runtime.model_files import weights_fingerprint
from tandem.runtime.node import Node
from tandem.runtime.trace import TraceFile
from tandem.transfer.group import TransferGroup
from tandem.transfer.layout import KvLayout
from tandem.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

# Of requests: a prompt of four million tokens; a prefill worker gets none on the request plane.
_MAX_FRAME_BYTES = {"decode": 16 * 1024 * 1024, "prefill": 1024 * 1024}

EXIT_DEVICE_LOST = 72  # the GPU answers this process no more
_LEAVE_S = 1.0

Details = dict[str, str | int | float | bool]


class Role(Protocol):
    """A role of a worker; its methods are called on the event loop."""

    endpoint: EndpointAddress

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Begin to work; the worker's parts are up. `stack` is closed before they are."""
        ...

    async def drain(self) -> None:
        """Leave discovery, take no new work, and wait for the work in hand."""
        ...

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Take the outputs of one step; those of unknown requests are not this role's."""
        ...


class Worker:
    """Engine, node, transfer group over the KV pool, queue and trace of one process.

    Closing ends them in an order that keeps the pool's memory valid while a peer may write to it.
    """

    def __init__(self, settings: WorkerSettings, component: Literal["decode", "prefill"]) -> None:
        runtime, engine = settings.runtime, settings.engine
        self.settings = settings
        self.component = component
        self.lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s)
        self.engine = build_in_thread(lambda: Engine(engine, ModelRunner(engine)))
        self.loop = EngineLoop(self.engine, self._on_outputs, on_device_lost=self._on_device_lost)
        self.node = node = Node(
            runtime,
            component=component,
            model=settings.model_name,
            progress=lambda: self.loop.progress,
            max_frame_bytes=_MAX_FRAME_BYTES[component],
        )
        pools = self.engine.runner.kv_caches
        layout = KvLayout.of(pools[0].tensor, tp_size=len(pools))
        self.group = TransferGroup(settings.transfer, layout, pools, node.instance_id, node.epoch)
        self.on_notification: Callable[[int, bytes], None] = _ignore  # of the group
        self.queue = JetStreamQueue(
            node.nats, settings.queue, runtime.namespace, settings.model_name
        )
        self.trace = TraceFile(runtime.trace_file, component, node.instance_id)
        self.weights_digest = weights_fingerprint(Path(engine.model))
        self.deployment = deployment_id(
            runtime.namespace,
            settings.model_name,
            self.weights_digest,
            layout.digest(),
        )
        self._load_subject = load_subject(runtime.namespace, node.instance_id)
        self._roles: list[Role] = []
        self._leaving: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def run(self, role: Role) -> None:
        """Serve as `role` until a signal ends the process."""
        freeze_gc()
        await self.lifecycle.run(
            startup=partial(self.startup, role), drain=role.drain, stop=self.stop
        )

    async def startup(self, role: Role) -> None:
        """Join the cluster, start `role`, and register it."""
        node, stack = self.node, self._stack
        self._roles.append(role)
        await stack.enter_async_context(self.trace)  # closed last: it has all that ends before
        stack.push_async_callback(node.close)
        await node.connect()
        await self.loop.start()
        stack.push_async_callback(self.loop.stop)
        stack.push_async_callback(self.group.close)
        await self.group.start(lambda rank, data: self.on_notification(rank, data))
        await self.queue.start()
        stack.push_async_callback(self.queue.close)
        await role.start(stack)
        await register_instance(node, node.instance(role.endpoint))
        name = self.settings.model_name
        logger.info("%s worker %s serves %s", self.component, node.instance_id, name)

    async def stop(self) -> None:
        """End everything; can be called after a `startup` that failed."""
        await self._stack.aclose()

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for role in self._roles:
            role.on_outputs(outputs)

    def _on_device_lost(self, error: DeviceLostError) -> None:
        if self._leaving is None:
            logger.critical("%s; the process ends", error.message)
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Leave discovery, and end the process: a new one can use the device again."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LEAVE_S):
                await self.node.withdraw()
        logging.shutdown()
        os._exit(EXIT_DEVICE_LOST)

    # ---- status -------------------------------------------------------------------------------

    async def load(self) -> LoadStats:
        """Return the engine's load, read between two steps."""
        return await self.loop.call(lambda engine: engine.load())

    def status(
        self,
        endpoint: EndpointAddress,
        load: LoadStats,
        details: Details,
        links: Sequence[LinkReport] = (),
    ) -> WorkerStatus:
        """Return the answer to `tandem status`, with the `details` of a role."""
        details |= {"nats": self.node.nats.connected, "etcd": self.node.discovery.connected}
        instance, state = self.node.instance(endpoint), self.lifecycle.state.value
        return WorkerStatus(instance, state, self._report(load), details, list(links))

    def publish(self, load: LoadStats) -> None:
        """Send the load to the frontends."""
        self.node.events.publish(self._load_subject, encode(self._report(load)))

    def _report(self, load: LoadStats) -> LoadReport:
        return load.report(self.node.instance_id, self.node.epoch, self.component)


def _ignore(rank: int, data: bytes) -> None:
    """Drop a notification: no role of this worker is written to."""
