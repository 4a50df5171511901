"""The open handoffs into the blocks of this process: their table and their endpoints.

Runs on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, ServiceError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import RequestServer, Responder
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
from tandem.transfer.handoff.receiver import HandoffReceiver
from tandem.transfer.peers import PeerHealth

logger = logging.getLogger(__name__)

decode_claim = decoder(Claim, InvalidRequestError)
_decode_settled = decoder(Settled, InvalidRequestError)
_decode_prefix_request = decoder(PrefixRequest, InvalidRequestError)

Receiver = TypeVar("Receiver", bound=HandoffReceiver)


class OpenHandoffs(Generic[Receiver]):
    """The open handoffs, by handoff id, and what prefill workers send them.

    `publish` puts a ticket on the queue.
    """

    def __init__(
        self,
        transfer: TransferConfig,
        node: Node,
        group: TransferGroup,
        publish: Callable[[PrefillJob], Awaitable[None]],
    ) -> None:
        self.health = PeerHealth(transfer.exclude_after, transfer.exclude_for_s)
        self._transfer = transfer
        self._node = node
        self._group = group
        self._publish = publish
        self._aio = asyncio.get_running_loop()
        self._open: dict[bytes, Receiver] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self.num_taken = 0  # handoffs that were claimed or given up; read by other threads

    @property
    def num_open(self) -> int:
        return len(self._open)

    def check_invariants(self) -> None:
        """Assert the invariants of every open handoff that hold between any two events."""
        for handoff_id, receiver in self._open.items():
            assert receiver.machine.handoff_id == handoff_id
            receiver.machine.check_invariants()

    def excluded(self) -> list[str]:
        """Return the prefill workers that get no work from here now. From any thread."""
        return self.health.excluded(time.perf_counter())

    def find(self, handoff_id: bytes) -> Receiver | None:
        return self._open.get(handoff_id)

    def add(self, receiver: Receiver) -> None:
        self._open[receiver.machine.handoff_id] = receiver

    def remove(self, receiver: Receiver) -> None:
        """Remove a handoff that has ended."""
        del self._open[receiver.machine.handoff_id]
        if receiver.machine.claimant is None:
            self.num_taken += 1

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

    def machine(
        self, handoff_id: bytes, grant: Claimed, *, awaits_first: bool = True
    ) -> DecodeHandoff:
        """Return the machine of a handoff that may take as long as its lease."""
        layout = self._group.layout
        return DecodeHandoff(
            handoff_id,
            1,
            grant,
            deadline=time.perf_counter() + grant.lease_ms / 1e3,
            grace_ms=self._transfer.grace_ms,
            num_layers=layout.num_layers,
            tp_size=layout.tp_size,
            verify=self._transfer.verify,
            awaits_first=awaits_first,
        )

    def begin(self, receiver: Receiver, claim_timeout_ms: float) -> None:
        """Set the timers of a handoff: its own, and `unclaimed` after this time."""
        receiver.run([])  # sets the machine's first timer
        self._aio.call_later(claim_timeout_ms / 1e3, self.unclaimed, receiver)

    def unclaimed(self, receiver: Receiver) -> None:
        """Give up a handoff that none has claimed in time."""
        receiver.give_up_unclaimed(CloseCause.UNCLAIMED, "no prefill worker claimed it in time")

    async def publish(
        self,
        receiver: Receiver,
        num_tokens: int,
        num_uncached_tokens: int,
        trace: Mapping[str, str] | None = None,
    ) -> bool:
        """Put the ticket of a handoff on the queue; False: the handoff is given up without it."""
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
        claim = decode_claim(payload)
        receiver = self.find(claim.handoff_id)
        if receiver is None:
            answer.send(encode(ClaimRefused("unknown")))
            return
        was_unclaimed = receiver.is_unclaimed
        if was_unclaimed and self.gives_way(receiver, claim.prefill_instance):
            answer.send(encode(ClaimRefused("late")))
            return
        if not receiver.claim(claim, answer):
            return
        self.num_taken += was_unclaimed
        forget = context.on_cancel(lambda: receiver.claim_stream_lost(claim, answer))
        try:
            await receiver.ended.wait()
        finally:
            forget()

    def gives_way(self, receiver: Receiver, prefill_instance: str) -> bool:
        """Return True if the ticket that this worker claims should be offered again later."""
        return False

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
