"""The members of a deployment: its jobs in Slurm, and the workers in them by Tandem's discovery."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence

from tandem.launch.cluster.one_worker import probe
from tandem.launch.cluster.status import ClusterReport, read_cluster
from tandem.launch.slurm.deployment import Deployment
from tandem.launch.supervise.slurm_commands import Job, cancel, jobs_named, let_leave
from tandem.runtime.address import new_id
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.child_process import log_tail
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.process.reporter import Reporter

POLL_S = 0.5
LOG_PATIENCE_S = 20.0  # the log of a running job shows on this host within this time
KILL_AFTER_DRAIN_S = 30.0
LOG_LINES = 5
NEVER_STARTS = "PartitionConfig"  # a reason to wait that only an administrator ends


class Members:
    """The live jobs of a deployment, and waits for their changes, none longer than `timeout_s`."""

    def __init__(self, deployment: Deployment, reporter: Reporter, timeout_s: float) -> None:
        self.deployment = deployment
        self._report = reporter
        self._timeout_s = timeout_s
        self._running_s: dict[str, float] = {}  # job |-> since when it was seen to run
        self._given_up = threading.Event()

    def service_jobs(self) -> list[Job]:
        """Return the service jobs, and their successors where some wait."""
        names = self.deployment.standby_job, self.deployment.name
        return [job for job in jobs_named(*names) if job.is_live]

    def worker_jobs(self) -> list[Job]:
        """Return the workers' jobs in the order of their numbers, the elder of a number first."""
        jobs = [job for job in jobs_named(self.deployment.worker_job) if job.is_live]
        return sorted(jobs, key=lambda job: (job.index or 0, int(job.job_id)))

    def serving(self, jobs: Sequence[Job]) -> dict[str, InstanceReport]:
        """Return job id |-> its worker, for the workers that serve."""
        return self.serving_in(self.cluster(), jobs)

    def serving_in(
        self, cluster: ClusterReport | None, jobs: Sequence[Job]
    ) -> dict[str, InstanceReport]:
        """Return those of `serving` in a state of the cluster; None: its services are away."""
        if cluster is None:
            return {}
        found = {job.id: self._worker_of(job, cluster) for job in jobs}
        return {key: worker for key, worker in found.items() if worker is not None}

    def cluster(self) -> ClusterReport | None:
        """Return the state of the cluster; None while its services do not answer."""
        try:
            return asyncio.run(read_cluster(self.deployment.effective()))
        except TandemError:
            return None

    def _worker_of(self, job: Job, cluster: ClusterReport) -> InstanceReport | None:
        try:
            place = self.deployment.process_file(job.job_id).read_text().split()
        except OSError:
            return None
        # the role that can be probed first, of a worker with both
        for each in sorted(cluster.instances, key=lambda each: each.instance.component):
            is_there = [each.instance.host, str(each.instance.pid)] == place
            if is_there and each.worker is not None and each.worker.state == "serving":
                return each
        return None

    # ---- waiting ------------------------------------------------------------------------------

    def until_serving(
        self, count: int, jobs_now: Callable[[], Sequence[Job]]
    ) -> list[InstanceReport]:
        """Return the workers of the jobs once `count` of them serve.

        Raise ServiceError when they cannot, and when the time is up.
        """
        deadline_s = time.perf_counter() + self._timeout_s
        while True:
            service, jobs = self.service_jobs(), jobs_now()
            self._require_logs([*service, *jobs])
            serving = self.serving(jobs)
            if len(serving) >= count:
                return list(serving.values())
            self._require_jobs(service, jobs, count)
            waiting = [job for job in [*service, *jobs] if job.id not in serving]
            text = "; ".join(f"{job.title}: {job.why}" for job in waiting[:3])
            self._report.progress(f"{len(serving)} of {count} workers serve; {text}")
            if time.perf_counter() > deadline_s:
                raise ServiceError(
                    f"{len(serving)} of {count} workers serve after {self._timeout_s:.0f} s; "
                    f"{text}. The jobs stay: `tandem slurm down` ends them"
                )
            self._pause()

    def _require_jobs(self, service: Sequence[Job], jobs: Sequence[Job], count: int) -> None:
        if not service:
            raise ServiceError(self._ended("the service job", None))
        for job in [*service, *jobs]:
            if job.reason == NEVER_STARTS:
                raise ServiceError(f"{job.title} cannot start: {job.why}; then `tandem slurm down`")
        if len(jobs) < count:
            numbers = {job.index for job in jobs}
            ended = [job for job in jobs_named(self.deployment.worker_job) if not job.is_live]
            # the latest: jobs of an earlier deployment may be among them, and arrays that never ran
            ended.sort(key=lambda job: int(job.job_id), reverse=True)
            known = (job.index for job in ended if job.index is not None)
            lost = next((index for index in known if index not in numbers), None)
            raise ServiceError(self._ended(f"worker {lost}", lost))

    def _ended(self, subject: str, index: int | None) -> str:
        path = self.deployment.log(index)
        if not path.exists():
            return f"{subject} ended and left no log: {self._not_shared('its node')}"
        return f"{subject} ended; its log, {path}, ends:\n{log_tail(path, LOG_LINES)}"

    def _require_logs(self, jobs: Collection[Job]) -> None:
        """Raise ServiceError when a job runs, and its log does not show here."""
        now_s = time.perf_counter()
        for job in (job for job in jobs if job.state == "RUNNING"):
            since_s = self._running_s.setdefault(job.id, now_s)
            if now_s - since_s > LOG_PATIENCE_S and not self.deployment.log(job.index).exists():
                raise ServiceError(f"{job.title} runs without a log: {self._not_shared(job.node)}")

    def _not_shared(self, node: str) -> str:
        folder = self.deployment.folder
        return f"{folder} is not shared with {node}; give --state-dir a folder that all nodes share"

    def release(self, jobs: Sequence[Job]) -> None:
        """Let the jobs leave and wait until they have ended; cancel those that do not."""
        for job in jobs:
            with contextlib.suppress(ServiceError):  # it has ended meanwhile
                let_leave(job)
        ids, names = {job.id for job in jobs}, {job.name for job in jobs}
        drain_s = self.deployment.drain_timeout_s() + KILL_AFTER_DRAIN_S
        deadline_s = time.perf_counter() + drain_s
        while left := [j for j in jobs_named(*names) if j.is_live and j.id in ids] if ids else []:
            if time.perf_counter() > deadline_s:
                cancel(left)
                self._report.warn(f"cancelled after {drain_s:.0f} s: {_titles(left)}")
                return
            self._pause()

    def give_up(self) -> None:
        """Let a wait in another thread end with ServiceError; the jobs stay as they are."""
        self._given_up.set()

    @property
    def has_given_up(self) -> bool:
        return self._given_up.is_set()

    def _pause(self) -> None:
        if self._given_up.wait(POLL_S):
            raise ServiceError("nothing waits for the jobs any longer; they stay")

    def probe(self, worker: InstanceReport) -> None:
        """Generate a token at a worker, if it has that role. Raise ServiceError if that fails."""
        if worker.instance.component == "decode":
            asyncio.run(self._probe(worker))

    async def _probe(self, worker: InstanceReport) -> None:
        client = RequestClient(self.deployment.effective().config.runtime, new_id())
        try:
            await probe(client, worker.instance)
        finally:
            await client.close()


def _titles(jobs: Sequence[Job]) -> str:
    return ", ".join(job.title for job in jobs)
