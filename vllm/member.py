"""One rank of a vLLM as a member of Tandem's cluster, on the connector's event loop."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from tandem.decode.thresholds import LiveThresholds
from tandem.prefill.metrics import PrefillMetrics
from tandem.prefill.tools import JobTools
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import (
    TypedView,
    config_prefix,
    register_instance,
    register_transfer,
    watch_instances,
    watch_transfer,
)
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.lifecycle import State
from tandem.runtime.messages import (
    Instance,
    LoadReport,
    TransferMetadata,
    WorkerRole,
    WorkerStatus,
    encode,
)
from tandem.runtime.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.tasks import keep_running
from tandem.runtime.trace import TraceFile
from tandem.transfer.group import TransferGroup
from tandem.transfer.handoff.sender import SenderTools
from tandem.transfer.layout import KvLayout
from tandem.transfer.network_devices import confine_ucx
from tandem.vllm.decode_side import VllmHandoffs
from tandem.vllm.ends import Ends
from tandem.vllm.kv_layout import VllmBlocks, VllmPool
from tandem.vllm.prefill_side import TicketPrompts, Tickets, stopped_ancestor
from tandem.vllm.prompts import PromptClient
from tandem.vllm.settings import ConnectorSettings
from tandem.vllm.step_messages import Orders, PrefillView

if TYPE_CHECKING:
    from torch.cuda import Event

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # between looks at the queue, the prefill workers and the own processes


class Member:
    """Node, transfer group, queue and handoffs of a rank; all but the constructor on its loop.

    `view` is replaced as a whole, so any thread may read it.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        pool: VllmPool,
        layout: KvLayout,
        blocks: VllmBlocks,
        ends: Ends,
    ) -> None:
        self.view = PrefillView(settings.disagg)
        self._settings = settings
        self._blocks = blocks
        self._ends = ends
        confine_ucx(settings.runtime.host)
        role: WorkerRole = "both" if settings.takes and settings.offers else "decode"
        self._role: WorkerRole = "prefill" if settings.takes and not settings.offers else role
        # Its metrics are served by nothing: the port is that of the worker whose engine this is
        alone = settings.runtime.model_copy(update={"metrics_port": None})
        self.node = node = Node(alone, component=self._role, model=settings.model)
        self._group = TransferGroup(settings.transfer, layout, [pool], node.instance_id, node.epoch)
        namespace = settings.runtime.namespace
        node.deployment = deployment_id(
            namespace,
            settings.model,
            settings.weights,
            settings.kv_form,
            self._group.layout.digest(),
            settings.transfer.backend,
        )
        self._queue = JetStreamQueue(
            node.nats, settings.queue, namespace, settings.model, node.deployment
        )
        self._endpoint = EndpointAddress(namespace, "prefill", "prefill")
        self._thresholds: LiveThresholds
        self._prefill_instances: TypedView[Instance]
        self._handoffs: VllmHandoffs
        self._prompts: TicketPrompts | None = None  # at a prefill worker
        self._tickets: Tickets | None = None
        self._stack = contextlib.AsyncExitStack()

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the cluster; peers can reach the pool afterwards. Raise TandemErrors."""
        try:
            await self._start(self._stack)
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        node, namespace = self.node, self._settings.runtime.namespace
        stack.push_async_callback(node.close)
        await node.connect()
        await self._queue.start()
        stack.push_async_callback(self._queue.close)
        await self._watch(stack, namespace)
        self._handoffs = VllmHandoffs(
            node=node,
            queue=self._queue,
            group=self._group,
            blocks=self._blocks,
            thresholds=lambda: self._thresholds.current,
            transfer=self._settings.transfer,
            prefill_instances=self._prefill_instances.items,
            ends=self._ends,
        )
        self._handoffs.register(node.server)
        node.server.register("status", self._status)
        stack.push_async_callback(self._group.close)
        await self._group.start(self._handoffs.on_notification)
        stack.push_async_callback(self._handoffs.close)
        if self._settings.offers:
            metadata = self._group.metadata(node.server.address, node.model, node.deployment)
            await register_transfer(node, namespace, metadata)
        if self._settings.takes:
            await self._take_tickets(stack, namespace)
        stack.callback(keep_running("the look at the queue", self._look_around).cancel)
        logger.info("vLLM's rank %s takes part as %s", node.instance_id, self._role)

    async def _watch(self, stack: contextlib.AsyncExitStack, namespace: str) -> None:
        discovery = self.node.discovery
        live = discovery.watch(config_prefix(namespace))
        stack.push_async_callback(live.close)
        self._thresholds = LiveThresholds(
            self._settings.disagg, live, namespace, self._settings.model
        )
        stack.callback(self._thresholds.close)
        self._prefill_instances = watch_instances(discovery, namespace, "prefill")
        stack.push_async_callback(self._prefill_instances.close)
        await self._prefill_instances.ready()

    async def _take_tickets(self, stack: contextlib.AsyncExitStack, namespace: str) -> None:
        node, settings = self.node, self._settings
        peers = watch_transfer(node.discovery, namespace)
        stack.push_async_callback(peers.close)
        await peers.ready()
        client = PromptClient()
        reader = await client.connect(settings.prompts)
        stack.callback(client.close)
        self._prompts = prompts = TicketPrompts(client, self._blocks, self._ends)
        stack.callback(asyncio.create_task(self._listen(client, reader)).cancel)
        metrics = PrefillMetrics(settings.model)
        sender = SenderTools(
            node=node,
            group=self._group,
            peers=peers,
            transfer=settings.transfer,
            deployment=node.deployment,
            compute=prompts.compute,
            on_written=metrics.written,
        )
        trace = TraceFile(None, "prefill", node.instance_id)
        tools = JobTools(sender, metrics, trace, settings.queue.ack_wait_s / 3)
        self._tickets = tickets = Tickets(tools, self._queue, settings.prefill)
        stack.push_async_callback(tickets.jobs.end, "the prefill worker stopped")
        stack.callback(peers.subscribe(self._meet))
        stack.callback(keep_running("the receiver of tickets", tickets.receive).cancel)
        await register_instance(node, node.instance(self._endpoint))

    async def _listen(self, client: PromptClient, reader: asyncio.StreamReader) -> None:
        assert self._prompts is not None
        await client.listen(reader)
        self._prompts.fail_all("the engine's process has ended")

    def _meet(self, instance_id: str, peer: TransferMetadata | None) -> None:
        """Connect to a decode worker before its first ticket comes; a ticket connects again."""
        if peer is None:
            self._handoffs.spawn(self._group.disconnect(instance_id))
        elif peer.deployment == self.node.deployment and instance_id != self.node.instance_id:
            self._handoffs.spawn(self._connect(peer))

    async def _connect(self, peer: TransferMetadata) -> None:
        try:
            await self._group.connect(peer)
        except TandemError as error:
            logger.warning("decode worker %s: %s", peer.instance_id, error.message)

    async def close(self) -> None:
        """Leave the cluster; can be called after a `start` that failed."""
        await self._stack.aclose()

    # ---- orders -------------------------------------------------------------------------------

    def take_offers(self, orders: Orders) -> None:
        """Publish tickets, and end those of requests that are over."""
        for offer in orders.offers:
            self._handoffs.start(offer)
        for key in orders.cancelled:
            self._handoffs.cancel(key)

    def take_progress(self, orders: Orders, event: "Event | None") -> None:
        """Have the blocks written that a step has completed once `event` has happened."""
        assert self._prompts is not None, "prompts of tickets are computed by prefill workers"
        for progress in orders.progress:
            self._prompts.advance(progress, event)
        for key in orders.over:
            self._prompts.fail(key, "the engine has ended the prompt")

    # ---- state --------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        deployment = self.node.deployment
        helpers = {
            each.instance_id
            for each in self._prefill_instances.items.values()
            if each.deployment == deployment and each.instance_id != self.node.instance_id
        }
        num_queued = self._handoffs.num_unclaimed
        with contextlib.suppress(ServiceError):
            if helpers and self._queue.connected:
                num_queued = max(num_queued, (await self._queue.depth()).num_jobs)
        self.view = PrefillView(
            thresholds=self._thresholds.current,
            num_instances=len(helpers.difference(self._handoffs.excluded())),
            queue_connected=self._queue.connected,
            num_queued_jobs=num_queued,
        )
        if self._prompts is not None and (pid := stopped_ancestor()) is not None:
            self._prompts.fail_all(f"the engine's process {pid} is stopped")
        await asyncio.sleep(LOOK_INTERVAL_S)

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        node = self.node
        load = LoadReport(node.instance_id, node.epoch, self._role, 0, 0, 0, 0, 0, 0)
        details: dict[str, str | int | float | bool] = {
            "engine": "vllm",
            "num_open_handoffs": self._handoffs.num_open,
            "num_jobs": 0 if self._tickets is None else len(self._tickets.jobs),
            "num_tickets": 0 if self._tickets is None else self._tickets.jobs.num_begun,
            "num_queued_jobs": self.view.num_queued_jobs,
        }
        details |= {f"handoffs.{end}": n for end, n in self._handoffs.num_ended.items()}
        links = self._group.reports()
        instance = node.instance(self._endpoint)
        answer.send(encode(WorkerStatus(instance, State.SERVING.value, load, details, links)))
