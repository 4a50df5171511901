"""One ticket on a prefill worker, towards its decode worker: claim, write block by block, settle.

The engine that computes the prompt is behind `Computation`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.store.discovery import TypedView
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.runtime.wire.handoff_messages import Claimed, ClaimRefused, PrefillJob
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.agents.link import Link
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.claimant import Claimant
from tandem.transfer.handoff.prefill import PrefillHandoff
from tandem.transfer.handoff.writer import BlockWriter

logger = logging.getLogger(__name__)


class Computation(Protocol):
    """The computation of one prompt, which has each block written once it is full."""

    async def run(self) -> None:
        """Compute until the end of the prompt, or until the machine has an error."""

    def stop(self, reason: str) -> None:
        """End `run` with a TransferError."""

    def release(self) -> None:
        """Free the prompt's blocks: nothing reads them any more."""


@dataclass(frozen=True, slots=True)
class SenderTools:
    """The parts of a prefill worker that all of its handoffs use."""

    node: Node
    group: TransferGroup
    peers: TypedView[TransferMetadata]
    transfer: TransferConfig
    deployment: str
    compute: Callable[[Claimant, BlockWriter, Timeline], Computation]
    on_written: Callable[[int | None], None]  # as in BlockWriter


class HandoffSender:
    """Carries one run of a ticket out."""

    def __init__(
        self, tools: SenderTools, ticket: PrefillJob, context: RequestContext, timeline: Timeline
    ) -> None:
        self.claimant = Claimant(tools.node, tools.group, tools.peers, ticket)
        self._tools = tools
        self._ticket = ticket
        self._context = context
        self._timeline = timeline

    async def run(self) -> str:
        """Claim the ticket and deliver its KV; return the outcome. Raise TandemErrors.

        "excluded" and "unregistered" are outcomes of a ticket that another worker can serve, "late"
        is one of a ticket that any can serve later.
        """
        ticket, claimant = self._ticket, self.claimant
        if ticket.deployment != self._tools.deployment:
            return "stale"
        peer = await claimant.find_peer()
        if peer.epoch != ticket.decode_epoch:
            return "stale"
        claim_sent_at = time.perf_counter()
        async with await claimant.claim(self._context) as stream:
            answer = await claimant.read_answer(stream)
            if isinstance(answer, ClaimRefused):
                return answer.reason
            if not isinstance(answer, Claimed):
                return "cancelled"
            self._timeline.mark("claimed")
            link = await self._connect(answer, peer)
            machine = PrefillHandoff(
                ticket.handoff_id,
                ticket.attempt,
                answer,
                claim_sent_at=claim_sent_at,
                margin_ms=self._tools.transfer.lease_margin_ms,
                num_layers=self._tools.group.layout.num_layers,
                rank_pairs=link.rank_pairs,
                run=claimant.run_id,
            )
            await self._deliver(stream, machine, link)
            return "delivered" if not machine.error else "failed"

    async def _connect(self, grant: Claimed, peer: TransferMetadata) -> Link:
        """Return a link for the grant's blocks. Settle if there is none."""
        try:
            if not all(0 <= block_id < peer.num_blocks for _, block_id in grant.fill):
                raise TransferError(f"a block to fill is out of range: {peer.num_blocks} blocks")
            return await self._tools.group.connect(peer)
        except TandemError as error:
            await self.claimant.settle_unwritten(error.message)
            raise

    async def _deliver(self, stream: ResponseStream, machine: PrefillHandoff, link: Link) -> None:
        """Compute and write until everything has landed, failed or been stopped; then settle."""
        tools, timeline = self._tools, self._timeline
        writer = BlockWriter(tools.group, machine, link, timeline, tools.on_written)
        prompt = tools.compute(self.claimant, writer, timeline)
        listening = asyncio.create_task(self._listen(stream, machine, prompt))
        try:
            await prompt.run()
        except TandemError as error:
            logger.warning("handoff %s: %s", self.claimant.request_id, error)
            machine.stop(error.message)
        finally:
            if machine.has_unposted:
                machine.stop("not every block was computed")
            await writer.drain()
            if not machine.pinned:  # else a write of unknown end may still read the blocks
                prompt.release()
                settled = machine.settled(timeline.since("claimed"))
                await self.claimant.settle(settled, machine.settled_notice())
            listening.cancel()

    async def _listen(
        self, stream: ResponseStream, machine: PrefillHandoff, prompt: Computation
    ) -> None:
        """Post nothing more once the decode worker cancels, ends the stream, or dies."""
        reason = "the decode worker retracted it"
        try:
            async for _ in stream:
                break
        except TandemError as error:
            reason = error.message
        if machine.has_unposted:
            machine.stop(reason)
            prompt.stop(reason)
