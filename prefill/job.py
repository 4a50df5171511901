"""One ticket on a prefill worker: claim, compute, write block by block, settle, acknowledge."""

import asyncio
import logging

from tandem.prefill.metrics import PrefillMetrics
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.process.logs import log_for
from tandem.runtime.tracing.spans import RequestSpan
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.tracing.trace import TraceFile
from tandem.transfer.handoff.sender import HandoffSender

logger = logging.getLogger(__name__)

EXCLUDED_DELAY_S = 0.05  # so that another prefill worker gets the ticket first
GIVE_WAY_DELAY_S = 0.25  # other tickets are served before


class Job:
    """The life of one delivery.

    A TandemError ends the job. Any other exception leaves `run`, the ticket stays unacknowledged,
    and the queue delivers it again.
    """

    def __init__(
        self,
        sender: HandoffSender,
        metrics: PrefillMetrics,
        trace: TraceFile,
        renew_interval_s: float,
        delivery: Delivery,
    ) -> None:
        self.delivery = delivery
        self.ticket = ticket = delivery.job
        self._sender = sender
        self._metrics = metrics
        self._trace = trace
        self._renew_interval_s = renew_interval_s
        self._timeline = Timeline()
        self._context = RequestContext(
            timeout_s=ticket.deadline_ms / 1e3, headers=dict(ticket.trace)
        )
        self._claimant = sender.claimant(ticket)
        self.request_id = self._claimant.request_id
        self._span = RequestSpan("prefill", self._context.headers, self._timeline)

    async def run(self) -> None:
        """Handle the ticket and acknowledge it, whether or not its KV was delivered.

        Without the KV, the decode worker prefills locally.
        """
        log_for(self.request_id, self._context.headers)
        renewing = asyncio.create_task(self._renew())
        try:
            async with self._context:
                outcome = await self._sender.run(self._claimant, self._context, self._timeline)
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            outcome = error.code
        finally:
            renewing.cancel()
        self._metrics.job_ended(outcome)
        self._record(outcome)
        if outcome in ("excluded", "unregistered"):
            await self.delivery.give_back(EXCLUDED_DELAY_S)  # for another prefill worker
        elif outcome == "late":
            await self.delivery.give_back(GIVE_WAY_DELAY_S)
        else:
            await self.delivery.ack()

    def cancel(self, reason: str) -> None:
        """Post nothing more, and settle; `run` ends once no write is under way."""
        self._context.cancel(reason)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_interval_s)
            await self.delivery.in_progress()

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
        conventions = {"gen_ai.request.model": self._sender.node.model}
        self._span.end(self._trace, self.request_id, args, error, conventions=conventions)
