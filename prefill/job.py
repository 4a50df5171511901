"""One ticket on a prefill worker: claim, compute, write block by block, settle, acknowledge."""

import asyncio
import logging

from tandem.prefill.tools import JobTools
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.process.logs import log_for
from tandem.runtime.tracing.spans import RequestSpan
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.handoff_messages import PrefillJob
from tandem.transfer.handoff.sender import HandoffSender

logger = logging.getLogger(__name__)

EXCLUDED_DELAY_S = 0.05  # so that another prefill worker gets the ticket first
GIVE_WAY_DELAY_S = 0.25  # other tickets are served before


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
        self._timeline = Timeline()
        self._context = RequestContext(
            timeout_s=ticket.deadline_ms / 1e3, headers=dict(ticket.trace)
        )
        self._sender = HandoffSender(tools.sender, ticket, self._context, self._timeline)
        self.request_id = self._sender.claimant.request_id
        self._span = RequestSpan("prefill", self._context.headers, self._timeline)

    async def run(self) -> None:
        """Handle the ticket and acknowledge it, whether or not its KV was delivered.

        Without the KV, the decode worker prefills locally.
        """
        log_for(self.request_id, self._context.headers)
        renewing = asyncio.create_task(self._renew())
        try:
            async with self._context:
                outcome = await self._sender.run()
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            outcome = error.code
        finally:
            renewing.cancel()
        self._tools.metrics.job_ended(outcome)
        self._record(outcome)
        if outcome in ("excluded", "unregistered"):
            await self._delivery.give_back(EXCLUDED_DELAY_S)  # for another prefill worker
        elif outcome == "late":
            await self._delivery.give_back(GIVE_WAY_DELAY_S)
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
        conventions = {"gen_ai.request.model": self._tools.sender.node.model}
        self._span.end(self._tools.trace, self.request_id, args, error, conventions=conventions)
