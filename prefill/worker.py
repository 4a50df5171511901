"""The prefill role: pulls tickets, computes prompts in batches, writes KV to decode workers."""

import asyncio
import contextlib
import logging
from functools import partial

from tandem.engine.schedule.outputs import LoadStats, SequenceOutput
from tandem.engine.schedule.sequence import layer_boundaries
from tandem.prefill.compute import PromptComputation, Prompts
from tandem.prefill.config import PrefillConfig
from tandem.prefill.job import GIVE_BACK_DELAY_S, RECEIVE_TIMEOUT_S, TURN_S, Job, RunningJobs
from tandem.prefill.metrics import PrefillMetrics
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.address import EndpointAddress
from tandem.runtime.store.discovery import watch_transfer
from tandem.runtime.tasks import cancel, ends_within, keep_running
from tandem.runtime.wire.cluster_messages import RoleName, TransferMetadata
from tandem.transfer.agents.link import GROUP_COUNTS
from tandem.transfer.handoff.sender import HandoffSender
from tandem.worker.role import Details
from tandem.worker.worker import Worker

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # after an unexpected error
CONNECT_RETRY_S = 5.0  # after a decode worker could not be connected to, or measured
LEAVE_S = 0.05  # between looks, while tickets are left to another worker
MAX_PASSED = 8  # own tickets in a row that a worker offers to others
TURN_TIMEOUT_S = 0.02  # of a look at the queue by a worker that is not free


class PrefillRole:
    """Pulls tickets, computes their prompts, and writes the KV to decode workers."""

    name: RoleName = "prefill"
    tickets = None

    def __init__(self, worker: Worker, config: PrefillConfig) -> None:
        self._worker = worker
        self._config = config
        self._namespace = worker.settings.runtime.namespace
        self.engine, self.loop = worker.engine, worker.loop
        self.node, self.queue, self._group = worker.node, worker.queue, worker.group
        self.endpoint = EndpointAddress(self._namespace, "prefill", "prefill")
        self.metrics = PrefillMetrics(worker.settings.model_name)
        self._prompts = Prompts(worker, self.metrics)
        self._jobs = RunningJobs()
        self._receiving: asyncio.Task[None] | None = None  # once it is up

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Follow the decode workers."""
        await self._watch_peers(stack)
        self._sender = HandoffSender(
            self.node,
            self._group,
            self._worker.settings.transfer,
            self._peers,
            compute=partial(PromptComputation, self._prompts),
            on_written=self.metrics.written,
        )
        stack.push_async_callback(self._jobs.end, "the prefill worker stopped")
        stack.push_async_callback(self._stop_receiving)

    async def take_up(self) -> None:
        """Begin to pull tickets."""
        self._receiving = keep_running("the receiver of tickets", self._receive)

    async def drain(self, patience_s: float | None = None) -> None:
        """Take no new ticket; current jobs go on, up to `patience_s` where it is given."""
        await self._stop_receiving()
        await self.queue.stop_receiving()  # tickets that were pulled and not begun go to others
        await self._jobs.drain("the prefill worker has another role now", patience_s)

    async def _stop_receiving(self) -> None:
        await cancel(self._receiving)

    async def _watch_peers(self, stack: contextlib.AsyncExitStack) -> None:
        """Connect to every decode worker before its first ticket comes."""
        self._peers = watch_transfer(self.node.discovery, self._namespace)
        stack.push_async_callback(self._peers.close)
        await self._peers.ready()
        connecting: set[asyncio.Task[None]] = set()

        def changed(instance_id: str, peer: TransferMetadata | None) -> None:
            if instance_id == self.node.instance_id or not self._fits(peer):
                return
            task = asyncio.create_task(self._meet(instance_id, peer))
            connecting.add(task)
            task.add_done_callback(connecting.discard)

        def stop_meeting() -> None:
            for task in connecting:
                task.cancel()

        stack.callback(stop_meeting)
        stack.callback(self._peers.subscribe(changed))

    def _fits(self, peer: TransferMetadata | None) -> bool:
        """Return False for a peer of another deployment, whose tickets are not for this worker."""
        if peer is None or peer.deployment == self._worker.deployment:
            return True
        if peer.model == self._worker.settings.model_name:
            own = self._group.metadata()
            logger.warning(
                "decode worker %s of %s does not fit: it has [%s %s], this worker [%s %s]%s",
                peer.instance_id,
                peer.model,
                peer.layout,
                peer.transport,
                own.layout,
                own.transport,
                ", of other weights" if peer.layout_hash == own.layout_hash else "",
            )
        return False

    async def _meet(self, instance_id: str, peer: TransferMetadata | None) -> None:
        """Connect to the peer and measure the link; retry until the peer leaves discovery."""
        if peer is None:
            await self._group.disconnect(instance_id)
            self.metrics.link_gone(instance_id)
        last_reason = ""
        while peer is not None and self._peers.items.get(instance_id) == peer:
            try:
                link = await self._group.connect(peer)
                num_layers = self._group.layout.num_layers
                for num_groups in GROUP_COUNTS:
                    await self._group.prepare(link, layer_boundaries(num_layers, num_groups))
                await self._group.measure(link)
                for report in self._group.reports():
                    self.metrics.link_measured(report)
                return
            except Exception as error:  # a stranger's metadata may cause any
                if (reason := repr(error)) != last_reason:
                    logger.warning("decode worker %s: %s", instance_id, reason)
                last_reason = reason
                await asyncio.sleep(CONNECT_RETRY_S)

    # ---- jobs ---------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Take tickets up to the budget of jobs and of uncached tokens."""
        while True:
            await self._jobs.room(self._config)
            try:
                await self._receive_next()
            except Exception:
                # The loop must go on: a worker that takes no more tickets is lost.
                logger.exception("a ticket could not be taken")
                await asyncio.sleep(RETRY_S)

    async def _receive_next(self) -> None:
        """Take a ticket, after the own prompts that came first.

        Where these never end, tickets have their turn between them: all workers may be as busy, or
        the one that should take a ticket may be its own, which asks for another.
        """
        is_free = await ends_within(self._has_time(), TURN_S)
        timeout_s = RECEIVE_TIMEOUT_S if is_free else TURN_TIMEOUT_S
        passed: set[bytes] = set()  # own tickets, which go behind those of others
        # One at a time: the next may exceed the budget, and other workers may be idle.
        while deliveries := await self.queue.receive(1, timeout_s):
            [delivery] = deliveries
            handoff_id = delivery.job.handoff_id
            is_own = delivery.job.decode_instance == self.node.instance_id
            if not is_own or handoff_id in passed or len(passed) == MAX_PASSED:
                await self._begin(delivery, has_turn=not is_free)
                return
            passed.add(handoff_id)
            await delivery.give_back()

    async def _has_time(self) -> None:
        """Wait until no own prompt comes first and no other worker should take tickets."""
        while True:
            await self._worker.own_prompts.none.wait()
            if not self._leaves_tickets():
                return
            await asyncio.sleep(LEAVE_S)

    def _job(self, delivery: Delivery) -> Job:
        renew_interval_s = self._worker.settings.queue.ack_wait_s / 3
        return Job(self._sender, self.metrics, self._worker.trace, renew_interval_s, delivery)

    def _leaves_tickets(self) -> bool:
        """Return True while another worker should take tickets, by the load reported last."""
        load, owner = self._worker.last_load, self._worker.roles.tickets
        return owner is not None and load is not None and owner.leaves_tickets(load)

    async def _begin(self, delivery: Delivery, *, has_turn: bool) -> None:
        ticket = delivery.job
        is_free = self._worker.own_prompts.none.is_set() and not self._leaves_tickets()
        if not (is_free or has_turn):
            # Answers or a prompt came while it was on its way: the next look comes after these.
            await delivery.give_back()
        elif ticket.decode_instance == self.node.instance_id:
            await self._end_own_ticket(delivery, is_free)
        elif ticket.num_tokens > self.node.max_prompt_tokens:  # for a worker with more context
            await delivery.give_back(GIVE_BACK_DELAY_S)
        else:
            await self._jobs.begin(self._job(delivery))

    async def _end_own_ticket(self, delivery: Delivery, is_free: bool) -> None:
        """Compute the prompt of a ticket here that no other worker has taken meanwhile."""
        owner = self._worker.roles.tickets
        if not is_free:
            await delivery.give_back()
        elif owner is None or owner.take_back(delivery.job):
            await delivery.ack()
        else:  # it waits at the queue, not here: another worker may have room at any time
            await delivery.give_back()
            await asyncio.sleep(LEAVE_S)

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self._prompts.advance(outputs)

    # ---- state --------------------------------------------------------------------------------

    def loaded(self, load: LoadStats) -> None:
        self.metrics.loaded(load)

    def details(self, load: LoadStats) -> Details:
        """Return lines of `tandem status`."""
        return {
            "num_jobs": len(self._jobs),
            "num_job_tokens": self._jobs.num_tokens,
            "num_peers": len(self._group.links),
        }
