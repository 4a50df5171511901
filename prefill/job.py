"""One ticket on a prefill worker: claim, compute, write block by block, settle, acknowledge."""

import asyncio
import logging
import time

from tandem.prefill.claim import Claimant
from tandem.prefill.compute import PromptComputation
from tandem.prefill.tools import JobTools
from tandem.prefill.writer import BlockWriter
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.logs import log_for
from tandem.runtime.messages import Claimed, ClaimRefused, PrefillJob, TransferMetadata
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.spans import RequestSpan
from tandem.runtime.timeline import Timeline
from tandem.transfer.handoff.prefill import PrefillHandoff
from tandem.transfer.link import Link

logger = logging.getLogger(__name__)

EXCLUDED_DELAY_S = 0.05  # so that another prefill worker gets the ticket first


class Job:
    """The life of one delivery.

    A TandemError ends the job. Any other exception leaves `run`, the ticket stays unacknowledged,
    and the queue delivers it again.
    """

    def __init__(self, tools: JobTools, delivery: Delivery) -> None:
        ticket = delivery.job
        self.ticket: PrefillJob = ticket
        self._tools = tools
        self._delivery = delivery
        self._claimant = Claimant(tools, ticket)
        self.request_id = self._claimant.request_id
        self._timeline = Timeline()
        self._context = RequestContext(
            timeout_s=ticket.deadline_ms / 1e3, headers=dict(ticket.trace)
        )
        self._span = RequestSpan("prefill", self._context.headers, self._timeline)

    async def run(self) -> None:
        """Handle the ticket and acknowledge it, whether or not its KV was delivered.

        Without the KV, the decode worker prefills locally.
        """
        log_for(self.request_id, self._context.headers)
        renewing = asyncio.create_task(self._renew())
        try:
            async with self._context:
                outcome = await self._handle()
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            outcome = error.code
        finally:
            renewing.cancel()
        self._tools.metrics.job_ended(outcome)
        self._record(outcome)
        if outcome in ("excluded", "unregistered"):
            await self._delivery.nak(EXCLUDED_DELAY_S)  # for another prefill worker
        else:
            await self._delivery.ack()

    def cancel(self, reason: str) -> None:
        """Post nothing more, and settle; `run` ends once no write is under way."""
        self._context.cancel(reason)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._tools.renew_interval_s)
            await self._delivery.in_progress()

    def _record(self, outcome: str) -> None:
        ticket = self.ticket
        args: dict[str, str | int] = {
            "handoff_id": ticket.handoff_id.hex(),
            "end": outcome,
            "decode_instance": ticket.decode_instance,
            "num_tokens": ticket.num_tokens,
            "num_uncached_tokens": ticket.num_uncached_tokens,
        }
        error = "" if outcome == "delivered" else outcome
        conventions = {"gen_ai.request.model": self._tools.node.model}
        self._span.end(self._tools.trace, self.request_id, args, error, conventions=conventions)

    async def _handle(self) -> str:
        """Claim the ticket and deliver its KV; return the outcome."""
        ticket, claimant = self.ticket, self._claimant
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
            await self._claimant.settle_unwritten(error.message)
            raise

    async def _deliver(self, stream: ResponseStream, machine: PrefillHandoff, link: Link) -> None:
        """Compute and write until everything has landed, failed or been stopped; then settle."""
        tools, timeline = self._tools, self._timeline
        writer = BlockWriter(tools, machine, link, timeline)
        prompt = PromptComputation(tools, self._claimant, writer, timeline)
        listening = asyncio.create_task(self._listen(stream, machine, prompt))
        try:
            await prompt.run()
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            machine.stop(error.message)
        finally:
            if machine.has_unposted:
                machine.stop("not every block was computed")
            await writer.drain()
            if not machine.pinned:  # else a write of unknown end may still read the blocks
                tools.loop.post(lambda engine: engine.abort(self.request_id))
                settled = machine.settled(timeline.since("claimed"))
                await self._claimant.settle(settled, machine.settled_notice())
            listening.cancel()

    async def _listen(
        self, stream: ResponseStream, machine: PrefillHandoff, prompt: PromptComputation
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
