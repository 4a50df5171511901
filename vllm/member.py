"""One rank of a vLLM as a member of Tandem's cluster, on the connector's event loop."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tandem.decode.thresholds import LiveThresholds
from tandem.prefill.job import GIVE_BACK_DELAY_S, RECEIVE_TIMEOUT_S, Job, RunningJobs
from tandem.prefill.metrics import PrefillMetrics
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.process.lifecycle import State
from tandem.runtime.store.discovery import (
    TypedView,
    config_prefix,
    register_instance,
    register_transfer,
    watch_instances,
    watch_transfer,
)
from tandem.runtime.tasks import keep_running
from tandem.runtime.tracing.trace import TraceFile
from tandem.runtime.wire.cluster_messages import (
    Instance,
    LoadReport,
    TransferMetadata,
    WorkerRole,
    WorkerStatus,
)
from tandem.runtime.wire.messages import encode
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.handoff.sender import HandoffSender
from tandem.transfer.handoff.server import HandoffServer
from tandem.transfer.network_devices import confine_ucx
from tandem.transfer.peers import is_stopped
from tandem.vllm.decode_side import VllmHandoffs
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.prefill_side import TicketPrompt, TicketPrompts, stopped_ancestor
from tandem.vllm.settings import ConnectorSettings, engine_of
from tandem.vllm.step_messages import Ends, Orders, PrefillView

if TYPE_CHECKING:
    from torch.cuda import Event

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # between looks at the queue, the prefill workers and the own processes


class Member:
    """Node, transfer group, queue and handoffs of a rank; all but the constructor on its loop.

    `view` is replaced as a whole, so any thread may read it.
    """

    def __init__(self, settings: ConnectorSettings, pool: VllmPool, ends: Ends) -> None:
        self._settings, self._pool, self._ends = settings, pool, ends
        self._config = config = settings.config
        self.view = PrefillView(config.disagg)
        confine_ucx(config.runtime.host, config.transfer.port_range)
        self._role: WorkerRole = "both" if settings.offers else "prefill"
        if not settings.takes:
            self._role = "decode"
        # Its metrics are served by nothing: the port is that of the worker whose engine this is
        alone = config.runtime.model_copy(update={"metrics_port": None})
        self.node = node = Node(
            alone, component=self._role, model=settings.model, instance_id=settings.instance_id
        )
        node.max_prompt_tokens = settings.max_prompt_tokens
        self._group = group = TransferGroup(
            config.transfer, pool.layout, [pool], node.instance_id, node.epoch
        )
        self._namespace = namespace = config.runtime.namespace
        node.deployment = deployment_id(
            namespace,
            settings.model,
            settings.weights,
            settings.kv_form,
            group.layout.digest(),
            config.transfer.backend,
        )
        self._queue = JetStreamQueue(
            node.nats, config.queue, namespace, settings.model, node.deployment
        )
        self._endpoint = EndpointAddress(namespace, "prefill", "prefill")
        self._thresholds: LiveThresholds
        self._prefill_instances: TypedView[Instance]
        self._server: HandoffServer
        self._handoffs: VllmHandoffs
        self._peers: TypedView[TransferMetadata]  # at a prefill worker, as the next three
        self._new_job: Callable[[Delivery], Job]
        self._prompts = TicketPrompts(node.client, settings.prompts, settings.rank, pool, ends)
        self._jobs = RunningJobs()
        self._stack = contextlib.AsyncExitStack()

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the cluster; peers can reach the pool afterwards. Raise TandemErrors."""
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        node = self.node
        stack.push_async_callback(node.close)
        await node.connect()
        await self._queue.start()
        stack.push_async_callback(self._queue.close)
        await self._watch(stack)
        instances, transfer = self._prefill_instances.items, self._config.transfer
        publish = None if self._settings.rank else self._queue.publish
        self._server = server = HandoffServer(node, self._group, transfer, instances, publish)
        self._handoffs = VllmHandoffs(server, self._pool, self._thresholds, self._ends)
        server.register(node.server)
        node.server.register("status", self._status)
        stack.push_async_callback(self._group.close)
        await self._group.start(server.on_notification)
        stack.push_async_callback(server.close)
        if self._settings.offers:
            metadata = self._group.metadata(node.server.address, node.model, node.deployment)
            await register_transfer(node, self._namespace, metadata)
        if self._settings.takes:
            await self._take_tickets(stack)
        stack.callback(keep_running("the look at the queue", self._look_around).cancel)
        logger.info("vLLM's rank %s takes part as %s", node.instance_id, self._role)

    async def _watch(self, stack: contextlib.AsyncExitStack) -> None:
        discovery, namespace = self.node.discovery, self._namespace
        live = discovery.watch(config_prefix(namespace))
        stack.push_async_callback(live.close)
        self._thresholds = LiveThresholds(self._config.disagg, live, namespace, self.node.model)
        stack.callback(self._thresholds.close)
        self._prefill_instances = watch_instances(discovery, namespace, "prefill")
        stack.push_async_callback(self._prefill_instances.close)
        await self._prefill_instances.ready()

    async def _take_tickets(self, stack: contextlib.AsyncExitStack) -> None:
        node, config = self.node, self._config
        self._peers = peers = watch_transfer(node.discovery, self._namespace)
        stack.push_async_callback(peers.close)
        await peers.ready()
        metrics = PrefillMetrics(node.model)
        sender = HandoffSender(
            node,
            self._group,
            config.transfer,
            peers,
            compute=partial(TicketPrompt, self._prompts),
            on_written=metrics.written,
        )
        trace = TraceFile(None, "prefill", node.instance_id)
        self._new_job = partial(Job, sender, metrics, trace, config.queue.ack_wait_s / 3)
        stack.push_async_callback(self._jobs.end, "the prefill worker stopped")
        stack.callback(peers.subscribe(self._meet))
        if self._settings.rank == 0:
            stack.callback(keep_running("the receiver of tickets", self._receive).cancel)
        await register_instance(node, node.instance(self._endpoint))

    async def _receive(self) -> None:
        """Take the next ticket and begin it, once the budget has room."""
        await self._jobs.room(self._config.prefill)
        for delivery in await self._queue.receive(1, RECEIVE_TIMEOUT_S):
            if delivery.job.num_tokens > self.node.max_prompt_tokens:  # for one with more context
                await delivery.give_back(GIVE_BACK_DELAY_S)
            else:
                await self._jobs.begin(self._new_job(delivery))

    def _meet(self, instance_id: str, peer: TransferMetadata | None) -> None:
        """Connect to a decode worker before its first ticket comes; a ticket connects again."""
        if peer is None:
            self._server.spawn(self._group.disconnect(instance_id))
        elif peer.deployment == self.node.deployment and instance_id != self.node.instance_id:
            self._server.spawn(self._connect(peer))

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
        """Publish tickets, end those of requests that are over, and follow the first rank's."""
        for offer in orders.offers:
            self._handoffs.start(offer)
        for key in orders.cancelled:
            self._handoffs.cancel(key)
        for key in orders.begun if self._settings.rank else ():
            ticket = self._prompts.follow(key, self.node.deployment, self._peers.items)
            self._server.spawn(self._jobs.begin(self._new_job(ticket)))

    def take_progress(self, orders: Orders, event: "Event | None") -> None:
        """Have the blocks written that a step has completed once `event` has happened."""
        for progress in orders.progress:
            self._prompts.advance(progress, event)
        for key in orders.over:
            self._prompts.fail(key, "the engine has ended the prompt")

    # ---- state --------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        deployment = self.node.deployment
        helpers = {
            each.instance_id: each.max_prompt_tokens
            for each in self._prefill_instances.items.values()
            if each.deployment == deployment and each.instance_id != self.node.instance_id
        }
        num_queued = self._server.num_unclaimed
        with contextlib.suppress(ServiceError):
            if helpers and self._queue.connected:
                num_queued = max(num_queued, (await self._queue.depth()).num_jobs)
        limits = [helpers[each] for each in helpers.keys() - self._server.excluded()]
        self.view = PrefillView(
            thresholds=self._thresholds.current,
            num_instances=len(limits),
            max_prompt_tokens=max(limits) if all(limits) and limits else 0,
            queue_connected=self._queue.connected,
            num_queued_jobs=num_queued,
        )
        if (prompts := self._prompts.open) and (pid := self._stopped_process()) is not None:
            for prompt in prompts.values():
                prompt.stop(f"the engine's process {pid} is stopped")
        await asyncio.sleep(LOOK_INTERVAL_S)

    def _stopped_process(self) -> int | None:
        """Return the id of a stopped process without which this engine computes nothing."""
        for each in self._prefill_instances.items.values():
            if engine_of(each.instance_id) == self._settings.engine and is_stopped(each):
                return each.pid
        return stopped_ancestor()

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        node = self.node
        load = LoadReport(node.instance_id, node.epoch, self._role, 0, 0, 0, 0, 0, 0)
        details: dict[str, str | int | float | bool] = {
            "engine": "vllm",
            "num_prefill_workers": self.view.num_instances,
            "num_open_handoffs": self._server.num_open,
            "num_jobs": len(self._jobs),
            "num_tickets": self._jobs.num_begun,
            "num_queued_jobs": self.view.num_queued_jobs,
        }
        details |= {f"handoffs.{end}": n for end, n in self._handoffs.num_ended.items()}
        links = self._group.reports()
        instance = node.instance(self._endpoint)
        answer.send(encode(WorkerStatus(instance, State.SERVING.value, load, details, links)))
