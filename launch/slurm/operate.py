"""`tandem slurm`: up, status, logs, scale, roll and down, over the jobs of one deployment."""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
from rich.table import Table

from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.status import planner_lines
from tandem.launch.slurm.deployment import Deployment, write_folder
from tandem.launch.slurm.members import POLL_S, Members
from tandem.launch.slurm.scripts import SERVICE, WORKER, render
from tandem.launch.supervise.slurm_commands import Job, cancel, let_leave, submit
from tandem.runtime.errors import ConfigError, NotFoundError, ServiceError
from tandem.runtime.local.child_process import log_tail
from tandem.runtime.process.reporter import Reporter, wide_console

ROOM_PATIENCE_S = 10.0  # a successor waits so long for a free node; then the elder makes room


def up(
    deployment: Deployment, config: EffectiveConfig, reporter: Reporter, timeout_s: float
) -> None:
    """Submit the jobs, wait until the workers serve, print the address."""
    members = Members(deployment, reporter, timeout_s)
    if jobs := [*members.service_jobs(), *members.worker_jobs()]:
        raise ConfigError(
            f"{jobs[0].title} of {deployment.name} is {jobs[0].state}: `tandem slurm down` ends "
            "it, --name starts another deployment"
        )
    write_folder(deployment, config, render(deployment))
    reporter.done(f"job {submit(deployment.path / SERVICE)}: NATS, etcd and the frontend")
    count = deployment.num_workers + deployment.num_spare
    try:
        _submit_workers(deployment, range(count), reporter)
    except ServiceError:
        cancel(members.service_jobs())
        raise
    members.until_serving(deployment.num_workers, members.worker_jobs)
    if deployment.has_standby:
        _submit_standby(deployment, members, reporter, deployment.standby_job)
    reporter.done(f"{deployment.num_workers} workers serve; logs: {deployment.path / 'logs'}")
    services = deployment.services()
    reporter.output("" if services is None else services.http_url)


def show_status(deployment: Deployment, reporter: Reporter, timeout_s: float) -> None:
    """Print the jobs, with the load of each worker that serves, and the address."""
    members = Members(deployment, reporter, timeout_s)
    service, workers = members.service_jobs(), members.worker_jobs()
    cluster = members.cluster()
    serving = members.serving_in(cluster, workers)
    services = deployment.services()
    table = Table(box=None, pad_edge=False)
    for heading in ("job", "what", "node", "state", "worker", "running", "waiting"):
        table.add_column(heading, overflow="fold")
    for job in [*service, *workers]:
        worker = serving.get(job.id)
        status = None if worker is None else worker.worker
        cells = ["-", "-", "-"]
        if worker is not None and status is not None:
            load = status.load
            cells = [worker.instance.instance_id[:8], str(load.num_running), str(load.num_waiting)]
        stands_by = job.index is None and services is not None and job.job_id != services.job_id
        what = f"{job.title}, stands by" if stands_by else job.title
        table.add_row(job.id, what, job.node, job.why, *cells)
    console = wide_console()
    console.print(table)
    if not service:
        console.print(f"no service job: `tandem slurm up` starts {deployment.name}")
    elif services is not None:
        count = f"{len(serving)} of {deployment.num_workers}"
        console.print(f"{count} workers serve at {services.http_url}")
    for line in [] if cluster is None else planner_lines(cluster):
        console.print(line)


def show_log(deployment: Deployment, worker: int | None, num_lines: int) -> None:
    """Print the end of a worker's log, or of the service job's. Raise NotFoundError without it."""
    path = deployment.log(worker)
    if not path.exists():
        raise NotFoundError(f"no log {path}: see `tandem slurm status`")
    print(log_tail(path, num_lines))


def scale(deployment: Deployment, count: int, reporter: Reporter, timeout_s: float) -> None:
    """Submit workers or end the least loaded, until `count` and the spare ones are left."""
    members = Members(deployment, reporter, timeout_s)
    if resize(members, count + deployment.num_spare, reporter):
        members.until_serving(count, members.worker_jobs)
    reporter.done(f"{len(members.worker_jobs())} workers, {deployment.num_spare} of them spare")


def resize(members: Members, wanted: int, reporter: Reporter) -> bool:
    """Submit workers, and return True; or end the least loaded, until `wanted` are left."""
    deployment, jobs = members.deployment, members.worker_jobs()
    if not members.service_jobs():
        raise NotFoundError(f"{deployment.name} has no service job: `tandem slurm up` starts it")
    deployment.scaled(max(1, wanted - deployment.num_spare)).save()
    if wanted <= len(jobs):
        members.release(_least_loaded(members, jobs)[: len(jobs) - wanted])
        return False
    taken = {job.index for job in jobs}
    free = [index for index in range(len(jobs) + wanted) if index not in taken]
    _submit_workers(deployment, free[: wanted - len(jobs)], reporter)
    return True


def roll(deployment: Deployment, reporter: Reporter, timeout_s: float) -> None:
    """Replace the service job by the one that stands by, then each worker, one at a time.

    A successor of a worker that serves and answers comes first.
    """
    members = Members(deployment, reporter, timeout_s)
    _roll_services(deployment, members, reporter)
    for elder in members.worker_jobs():
        assert elder.index is not None, "a worker is an element of an array"
        array = _submit_workers(deployment, [elder.index], reporter)
        successor = _started(members, elder, array, timeout_s)
        (worker,) = members.until_serving(1, partial(_of, members, array))
        members.probe(worker)
        members.release([elder])
        reporter.done(f"worker {elder.index}: {elder.id} is replaced by {successor.id}")


def down(deployment: Deployment, reporter: Reporter, timeout_s: float) -> None:
    """End the frontend after its answers, then the workers and the services."""
    members = Members(deployment, reporter, timeout_s)
    workers = members.worker_jobs()
    msgspec.structs.replace(deployment, has_standby=False).save()  # no service job waits for one
    cancel([job for job in workers if job.state == "PENDING"])
    members.release(members.service_jobs())
    members.release(members.worker_jobs())
    deployment.services_file.unlink(missing_ok=True)
    reporter.done(f"{deployment.name} is down; logs: {deployment.path / 'logs'}")


def _roll_services(deployment: Deployment, members: Members, reporter: Reporter) -> None:
    jobs, services = members.service_jobs(), deployment.services()
    serving = [job for job in jobs if services is not None and job.job_id == services.job_id]
    if not serving or not any(job.state == "RUNNING" for job in jobs if job not in serving):
        reporter.warn("the service job stays as it is: none stands by for it")
        return
    (elder,) = serving
    members.release(serving)
    if (services := deployment.services()) is None or services.job_id in ("", elder.job_id):
        raise ServiceError(f"no job serves in place of {elder.id}: see `tandem slurm logs`")
    reporter.done(f"the service job {elder.id} is replaced by {services.job_id}")
    # Not by the other name: a job's successor waits for all jobs of its name.
    _submit_standby(deployment, members, reporter, elder.name)


def _submit_standby(
    deployment: Deployment, members: Members, reporter: Reporter, name: str
) -> None:
    nodes = ",".join(job.node for job in members.service_jobs() if job.node)
    try:
        job = submit(deployment.path / SERVICE, f"--job-name={name}", f"--exclude={nodes}")
    except ServiceError as error:
        reporter.warn(f"no other node can stand by for the services of {nodes}: {error.message}")
    else:
        reporter.done(f"job {job}: stands by for the first one on another node")


def _submit_workers(deployment: Deployment, indices: Sequence[int], reporter: Reporter) -> str:
    numbers = ",".join(map(str, indices))
    array = submit(deployment.path / WORKER, f"--array={numbers}")
    reporter.done(f"job {array}: worker{'s' if len(indices) > 1 else ''} {numbers}")
    return array


def _started(members: Members, elder: Job, array: str, timeout_s: float) -> Job:
    """Return the successor once it runs; the elder makes room where no node is free.

    It does so only while another worker serves. Raise ServiceError when the time is up.
    """
    begun_s = time.perf_counter()
    has_room = False
    while True:
        (successor,) = _of(members, array)
        if successor.state == "RUNNING":
            return successor
        waited_s = time.perf_counter() - begun_s
        others = [job for job in members.worker_jobs() if job.id not in (elder.id, successor.id)]
        if not has_room and waited_s > ROOM_PATIENCE_S and members.serving(others):
            has_room = True
            let_leave(elder)
        if waited_s > timeout_s:
            cancel([successor])
            raise ServiceError(
                f"the successor of {elder.title} does not start: {successor.why}. Nothing was "
                "ended: free a node, or run more workers"
            )
        time.sleep(POLL_S)


def _of(members: Members, array: str) -> list[Job]:
    return [job for job in members.worker_jobs() if job.id.partition("_")[0] == array]


def _least_loaded(members: Members, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs in the order in which to end them: those that do not serve first."""
    serving = members.serving(jobs)

    def load(job: Job) -> tuple[int, int]:
        status = serving[job.id].worker if job.id in serving else None
        if status is None:
            return 0, 0
        return 1, status.load.num_running + status.load.num_waiting

    return sorted(jobs, key=load)
