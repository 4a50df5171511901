"""Starting and ending workers of a deployment on Slurm for its planner."""

import asyncio
from collections.abc import Callable
from functools import partial

from tandem.launch.slurm.deployment import Deployment, read_deployment
from tandem.launch.slurm.members import Members
from tandem.launch.slurm.operate import resize
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.wire.cluster_messages import Instance, WorkerRole


class SlurmExecutor:
    """Submits and ends the jobs of workers.

    Jobs that do not serve yet count, also those of an earlier planner: so no bound is exceeded.
    """

    def __init__(self, deployment: Deployment, reporter: Reporter, timeout_s: float) -> None:
        self._folder, self._reporter, self._timeout_s = deployment.path, reporter, timeout_s

    async def start(self, role: WorkerRole, count: int) -> str:
        """Return once so many more workers serve. Those that do not are taken back."""
        await self._run(partial(self._start, count))
        return f"{count} workers"

    async def stop(self, worker: Instance) -> None:
        """End the worker that is the least loaded by now."""
        await self._run(self._end_one)

    def _start(self, count: int, members: Members) -> None:
        jobs = members.worker_jobs()
        wanted = len(members.serving(jobs)) + count
        try:
            resize(members, max(wanted, len(jobs)), self._reporter)
            members.until_serving(wanted, members.worker_jobs)
        except ServiceError:
            if not members.has_given_up:
                resize(members, len(jobs), self._reporter)
            raise

    def _end_one(self, members: Members) -> None:
        jobs = members.worker_jobs()
        if len({job.index for job in jobs}) < len(jobs):
            raise ServiceError("a worker and its successor are both there: none is ended")
        resize(members, len(jobs) - 1, self._reporter)

    async def _run(self, work: Callable[[Members], None]) -> None:
        """Do work with the deployment, which other commands change too, in a thread."""
        members = Members(read_deployment(self._folder), self._reporter, self._timeout_s)
        try:
            await asyncio.to_thread(work, members)
        except asyncio.CancelledError:
            members.give_up()
            raise
