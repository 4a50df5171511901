"""One ticket on a prefill worker, towards its decode worker: claim, write block by block, settle.

The engine that computes the prompt is behind `Computation`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
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


class HandoffSender:
    """Carries out the tickets of a prefill worker. `compute` begins to compute a prompt.

    `on_written` is as in BlockWriter.
    """

    def __init__(
        self,
        node: Node,
        group: TransferGroup,
        transfer: TransferConfig,
        peers: TypedView[TransferMetadata],
        *,
        compute: Callable[[Claimant, BlockWriter, Timeline], Computation],
        on_written: Callable[[int | None], None],
    ) -> None:
        self.node = node
        self._group = group
        self._transfer = transfer
        self._peers = peers
        self._compute = compute
        self._on_written = on_written

    def claimant(self, ticket: PrefillJob) -> Claimant:
        """Return one run of a ticket."""
        return Claimant(self.node, self._group, self._peers, ticket)

    async def run(self, claimant: Claimant, context: RequestContext, timeline: Timeline) -> str:
        """Claim the ticket and deliver its KV; return the outcome. Raise TandemErrors.

        "excluded" and "unregistered" are outcomes of a ticket that another worker can serve; "late"
        is one of a ticket that any can serve later, and so is "no_peer" where the decode worker is
        new.
        """
        ticket = claimant.ticket
        if ticket.deployment != self.node.deployment:
            return "stale"
        if (peer := claimant.find_peer()) is None:
            return "no_peer"
        if peer.epoch != ticket.decode_epoch:
            return "stale"
        claim_sent_at = time.perf_counter()
        async with await claimant.claim(context) as stream:
            answer = await claimant.read_answer(stream)
            if isinstance(answer, ClaimRefused):
                return answer.reason
            if not isinstance(answer, Claimed):
                return "cancelled"
            timeline.mark("claimed")
            link = await self._connect(claimant, answer, peer)
            machine = PrefillHandoff(
                ticket.handoff_id,
                ticket.attempt,
                answer,
                claim_sent_at=claim_sent_at,
                margin_ms=self._transfer.lease_margin_ms,
                num_layers=self._group.layout.num_layers,
                rank_pairs=link.rank_pairs,
                run=claimant.run_id,
            )
            writer = BlockWriter(self._group, machine, link, timeline, self._on_written)
            await self._deliver(claimant, stream, writer, timeline)
            return "delivered" if not machine.error else "failed"

    async def _connect(self, claimant: Claimant, grant: Claimed, peer: TransferMetadata) -> Link:
        """Return a link for the grant's blocks. Settle if there is none."""
        try:
            if not all(0 <= block_id < peer.num_blocks for _, block_id in grant.fill):
                raise TransferError(f"a block to fill is out of range: {peer.num_blocks} blocks")
            return await self._group.connect(peer)
        except TandemError as error:
            await claimant.settle_unwritten(error.message)
            raise

    async def _deliver(
        self, claimant: Claimant, stream: ResponseStream, writer: BlockWriter, timeline: Timeline
    ) -> None:
        """Compute and write until everything has landed, failed or been stopped; then settle."""
        machine, prompt = writer.machine, self._compute(claimant, writer, timeline)
        listening = asyncio.create_task(self._listen(stream, machine, prompt))
        try:
            await prompt.run()
        except TandemError as error:
            logger.warning("handoff %s: %s", claimant.request_id, error)
            machine.stop(error.message)
        finally:
            if machine.has_unposted:
                machine.stop("not every block was computed")
            await writer.drain()
            if not machine.pinned:  # else a write of unknown end may still read the blocks
                prompt.release()
                settled = machine.settled(timeline.since("claimed"))
                await claimant.settle(settled, machine.settled_notice())
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
