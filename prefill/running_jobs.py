"""The jobs of a prefill worker that run now."""

import asyncio
import logging

from tandem.prefill.config import PrefillConfig
from tandem.prefill.job import Job

logger = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 5.0  # of a single wait for a job at the queue


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

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._jobs[task]
        self._end.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a job failed", exc_info=error)
