"""The tickets of a prefill worker: claim, compute, write block by block, settle, acknowledge."""

import asyncio
import logging

from tandem.prefill.config import PrefillConfig
from tandem.prefill.metrics import PrefillMetrics
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.printable import short
from tandem.runtime.process.logs import log_for
from tandem.runtime.tracing.spans import RequestSpan
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.tracing.trace import TraceFile
from tandem.transfer.handoff.sender import HandoffSender

logger = logging.getLogger(__name__)

TURN_S = 0.6  # a worker leaves tickets for so long because of its load; then it may take one
GIVE_BACK_DELAY_S = 0.01  # so that another worker gets the ticket
RECEIVE_TIMEOUT_S = 5.0  # of a single wait for a job at the queue
EXCLUDED_DELAY_S = 0.05  # so that another prefill worker gets the ticket first
GIVE_WAY_DELAY_S = 0.25  # other tickets are served before
PEER_DELAY_S = 0.25  # the ticket of a new decode worker can arrive before its metadata
MAX_PEER_RETURNS = 2  # then a decode worker would have given the ticket up


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
        elif outcome == "no_peer" and self.ticket.num_returns < MAX_PEER_RETURNS:
            await self.delivery.give_back(PEER_DELAY_S)
        else:
            if outcome == "no_peer":
                whose = short(self.ticket.decode_instance)
                logger.warning(
                    "handoff %s: no decode worker %s is registered", self.request_id, whose
                )
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


class RunningJobs:
    """The jobs that run now, one per attempt of a handoff."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._jobs: dict[asyncio.Task[None], Job] = {}
        self._end = asyncio.Event()  # of any job

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_tokens(self) -> int:
        """The uncached tokens of all jobs."""
        return sum(job.ticket.num_uncached_tokens for job in self._jobs.values())

    async def begin(self, job: Job) -> None:
        """Run a job, or acknowledge the ticket of one that runs already."""
        if any(job.request_id == other.request_id for other in self._jobs.values()):
            # Two jobs of one attempt would each settle while the other still writes.
            logger.info("handoff %s was delivered again while it runs", job.request_id)
            await job.delivery.ack()
            return
        task = asyncio.create_task(job.run())
        self._jobs[task] = job
        self.num_begun += 1
        task.add_done_callback(self._ended)

    async def room(self, config: PrefillConfig) -> None:
        """Wait until the budget of jobs and of uncached tokens has room for one more."""
        while len(self) >= config.max_batch_jobs or self.num_tokens >= config.max_batch_tokens:
            self._end.clear()
            await self._end.wait()

    async def drain(self, reason: str, patience_s: float | None) -> None:
        """Wait for the jobs, up to `patience_s` where it is given; cancel those that are left."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=patience_s)
        self._cancel(reason)

    async def end(self, reason: str) -> None:
        """Let no job post any more, and wait until each has settled."""
        self._cancel(reason)
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _cancel(self, reason: str) -> None:
        for job in self._jobs.values():
            job.cancel(reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._jobs[task]
        self._end.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a job failed", exc_info=error)
