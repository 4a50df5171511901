"""The open handoffs into the blocks of this process: their table and their endpoints.

Runs on the event loop.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, ServiceError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.printable import short
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import (
    Ack,
    Claim,
    Claimed,
    ClaimRefused,
    PrefillJob,
    PrefixBlocks,
    PrefixRequest,
    Settled,
)
from tandem.runtime.wire.messages import encode
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.decode import DecodeHandoff
from tandem.transfer.handoff.landed import decode_landed, decode_settled
from tandem.transfer.handoff.receiver import BlockOwner, HandoffReceiver
from tandem.transfer.peers import PeerHealth

logger = logging.getLogger(__name__)

_CLAIM_WAIT_S = 1.0  # less than a prefill worker waits for the answer to its claim
_decode_claim = decoder(Claim, InvalidRequestError)
_decode_settled = decoder(Settled, InvalidRequestError)
_decode_prefix_request = decoder(PrefixRequest, InvalidRequestError)


class HandoffServer:
    """The open handoffs, by handoff id, and what prefill workers send them.

    `publish` puts a ticket on the queue. None: another rank publishes the tickets. Then a claim can
    come before its handoff is opened here, and no other claim follows one that is refused.
    """

    def __init__(
        self,
        node: Node,
        group: TransferGroup,
        transfer: TransferConfig,
        prefill_instances: Mapping[str, Instance],
        publish: Callable[[PrefillJob], Awaitable[None]] | None,
    ) -> None:
        self.health = PeerHealth(transfer.exclude_after, transfer.exclude_for_s)
        self.group = group
        self._node = node
        self._transfer = transfer
        self._prefill_instances = prefill_instances
        self._publish = publish
        self._aio = asyncio.get_running_loop()
        self._open: dict[bytes, HandoffReceiver] = {}
        self._opened = asyncio.Event()  # any handoff
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def has_tickets(self) -> bool:
        """This rank publishes the tickets."""
        return self._publish is not None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_unclaimed(self) -> int:
        return sum(handoff.is_unclaimed for handoff in self._open.values())

    def check_invariants(self) -> None:
        """Assert the invariants of every open handoff that hold between any two events."""
        for handoff_id, receiver in self._open.items():
            assert receiver.machine.handoff_id == handoff_id
            receiver.machine.check_invariants()

    def excluded(self) -> list[str]:
        """Return the prefill workers that get no work from here now. From any thread."""
        return self.health.excluded(time.perf_counter())

    def find(self, handoff_id: bytes) -> HandoffReceiver | None:
        return self._open.get(handoff_id)

    def remove(self, receiver: HandoffReceiver) -> None:
        """Remove a handoff that has ended."""
        del self._open[receiver.machine.handoff_id]

    async def close(self) -> None:
        """Retract all open handoffs, while the pool is registered."""
        for receiver in list(self._open.values()):
            receiver.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work`; `close` awaits it."""
        task = self._aio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- tickets ------------------------------------------------------------------------------

    def open(
        self,
        owner: BlockOwner,
        grant: Claimed,
        request_id: str,
        timeline: Timeline,
        *,
        handoff_id: bytes | None = None,
        cached_blocks: Mapping[int, int] | None = None,  # as in HandoffReceiver
        awaits_first: bool = True,
    ) -> HandoffReceiver:
        """Open a handoff that may take as long as its lease."""
        machine = DecodeHandoff(
            handoff_id or secrets.token_bytes(16),
            1,
            grant,
            deadline=time.perf_counter() + grant.lease_ms / 1e3,
            grace_ms=self._transfer.grace_ms,
            layout=self.group.layout,
            verify=self._transfer.verify,
            awaits_first=awaits_first,
        )
        receiver = HandoffReceiver(self, machine, owner, request_id, timeline, cached_blocks or {})
        self._open[machine.handoff_id] = receiver
        self._opened.set()
        receiver.run([])  # sets the machine's first timer
        return receiver

    async def publish(
        self,
        receiver: HandoffReceiver,
        num_tokens: int,
        num_uncached_tokens: int,
        trace: Mapping[str, str] | None = None,
    ) -> bool:
        """Put the ticket of a handoff on the queue; False: the handoff is given up without it."""
        assert self._publish is not None, "another rank publishes the tickets"
        node, machine = self._node, receiver.machine
        job = PrefillJob(
            handoff_id=machine.handoff_id,
            attempt=machine.attempt,
            deployment=node.deployment,
            decode_instance=node.instance_id,
            decode_epoch=node.epoch,
            num_tokens=num_tokens,
            num_uncached_tokens=num_uncached_tokens,
            deadline_ms=machine.grant.lease_ms,
            trace=dict(trace or {}),
        )
        try:
            await self._publish(job)
        except ServiceError as error:
            logger.warning("request %s: no ticket: %s", receiver.request_id, error)
            # A claim proves that the queue has the ticket, and that only its answer was late.
            receiver.give_up_unclaimed(CloseCause.QUEUE_LOST, "the prefill queue is not reachable")
            return False
        receiver.machine.published()
        return True

    # ---- messages of prefill workers; those of unknown handoffs are dropped -------------------

    def register(self, server: RequestServer) -> None:
        """Serve the handoff endpoints."""
        server.register("claim", self._on_claim)
        server.register("settled", self._on_settled)
        server.register("prefix_blocks", self._on_prefix_blocks)

    async def _on_claim(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """Answer a claim; the stream of a granted one stays open until the handoff has ended."""
        claim = _decode_claim(payload)
        receiver = await self._find_claimed(claim.handoff_id)
        if receiver is None:
            answer.send(encode(ClaimRefused("unknown")))
            return
        if receiver.is_unclaimed and receiver.owner.defers(claim.prefill_instance):
            answer.send(encode(ClaimRefused("late")))
            return
        if not self._claim(receiver, claim, answer):
            if not self.has_tickets:
                reason = "the claim of this rank was refused"
                receiver.give_up_unclaimed(CloseCause.FAILED, reason)
            return
        forget = context.on_cancel(lambda: receiver.claim_stream_lost(claim, answer))
        try:
            await receiver.claim_over.wait()
        finally:
            forget()

    async def _find_claimed(self, handoff_id: bytes) -> HandoffReceiver | None:
        """Return a handoff; wait a little for one whose ticket another rank has published."""
        if not self.has_tickets:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLAIM_WAIT_S):
                    while self.find(handoff_id) is None:
                        self._opened.clear()
                        await self._opened.wait()
        return self.find(handoff_id)

    def _claim(self, receiver: HandoffReceiver, claim: Claim, answer: Responder) -> bool:
        """Answer the claim of a known handoff; False if it was refused."""
        claimant = self._prefill_instances.get(claim.prefill_instance)
        process = claim.prefill_instance, claim.prefill_epoch
        if self.health.is_excluded(process, time.perf_counter()):
            answer.send(encode(ClaimRefused("excluded")))
            return False
        if claimant is None or claimant.epoch != claim.prefill_epoch:
            logger.warning("refused a claim of %s: not registered", short(claim.prefill_instance))
            answer.send(encode(ClaimRefused("unregistered")))
            return False
        return receiver.claim(claim, claimant, answer)

    async def _on_settled(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        settled = _decode_settled(payload)
        if (receiver := self.find(settled.handoff_id)) is not None:
            receiver.settled(settled)
        answer.send(encode(Ack()))

    async def _on_prefix_blocks(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        request = _decode_prefix_request(payload)
        receiver = self.find(request.handoff_id)
        blocks = PrefixBlocks() if receiver is None else await receiver.prefix_blocks(request)
        answer.send(encode(blocks))

    def on_notification(self, decode_rank: int, data: bytes) -> None:
        """Handle a message of the transfer plane to one of the own ranks, from any sender."""
        if (landed := decode_landed(data)) is not None:
            if (receiver := self.find(landed.handoff_id)) is not None:
                receiver.landed(landed, decode_rank)
        elif (settled := decode_settled(data)) is not None:
            if (receiver := self.find(settled.handoff_id)) is not None:
                receiver.settled_notice(settled)
        else:
            logger.warning("dropped %d bytes over the transfer plane: no such message", len(data))
