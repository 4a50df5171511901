"""A planner submits and ends the jobs of workers; a list of jobs stands for Slurm."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.launch.slurm import members, operate
from tandem.launch.slurm.deployment import read_deployment
from tandem.launch.slurm.executor import SlurmExecutor
from tandem.launch.slurm.members import Members
from tandem.launch.supervise.slurm_commands import Job
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.wire.cluster_messages import Instance, LoadReport
from tests.launch.slurm.unsubmitted import deployment_in
from tests.services import eventually

LEAVES = Instance("ns", "decode", "generate", "id", "10.0.0.1:1", "epoch")


class ListedJobs:
    """Slurm's jobs: those that are submitted serve at once where `can_serve` is True."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = [Job("1", "1", "tandem", "RUNNING", "n0", "None", None)]
        self.can_serve = True
        self.serving: set[str] = set()
        self.deployment = deployment_in(folder)
        (folder / "config.yaml").write_text("runtime: {drain_timeout_s: 1}\n")
        self.deployment.save()
        monkeypatch.setattr(members, "POLL_S", 0.01)
        monkeypatch.setattr(members, "jobs_named", self.named)
        monkeypatch.setattr(members, "let_leave", self.live.remove)
        monkeypatch.setattr(operate, "submit", self.submit)
        monkeypatch.setattr(Members, "cluster", lambda _: None)
        monkeypatch.setattr(Members, "serving_in", self.serving_in)

    @property
    def workers(self) -> list[Job]:
        return [job for job in self.live if job.index is not None]

    def named(self, *names: str) -> list[Job]:
        return [job for job in self.live if job.name in names]

    def submit(self, script: Path, *options: str) -> str:
        array = str(len(self.live) + 100)
        numbers = options[0].removeprefix("--array=").split(",")
        for number in numbers:
            job = Job(
                *(f"{array}_{number}", array, "tandem-worker"), "PENDING", "", "None", int(number)
            )
            self.live.append(job)
            if self.can_serve:
                self.serving.add(job.id)
        return array

    def serving_in(self, _: None, jobs: list[Job]) -> dict[str, Any]:
        load = LoadReport("id", "epoch", "both", 0, 0, 0, 8, 8, 0)
        idle = SimpleNamespace(worker=SimpleNamespace(load=load))
        return {job.id: idle for job in jobs if job.id in self.serving}

    def executor(self, timeout_s: float = 60.0) -> SlurmExecutor:
        return SlurmExecutor(self.deployment, Reporter(), timeout_s)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListedJobs:
    return ListedJobs(tmp_path / "state", monkeypatch)


def test_the_jobs_are_as_many_as_were_asked_for(jobs: ListedJobs) -> None:
    asyncio.run(jobs.executor().start("both", 3))
    assert [job.index for job in jobs.workers] == [0, 1, 2]
    assert read_deployment(jobs.deployment.path).num_workers == 3
    asyncio.run(jobs.executor().stop(LEAVES))
    assert len(jobs.workers) == 2 and read_deployment(jobs.deployment.path).num_workers == 2


async def test_jobs_that_do_not_serve_yet_are_waited_for_and_not_submitted_again(
    jobs: ListedJobs,
) -> None:
    jobs.submit(Path(), "--array=0")
    jobs.can_serve = False
    jobs.submit(Path(), "--array=1,2")  # by a planner that has ended meanwhile
    start = asyncio.create_task(jobs.executor().start("both", 2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(start), 0.2)
    jobs.serving |= {job.id for job in jobs.workers}
    assert await asyncio.wait_for(start, 60) == "2 workers"
    assert [job.index for job in jobs.workers] == [0, 1, 2]


async def test_workers_that_do_not_come_to_serve_are_taken_back(jobs: ListedJobs) -> None:
    jobs.submit(Path(), "--array=0")
    jobs.can_serve = False
    with pytest.raises(ServiceError, match="1 of 3 workers serve after 0 s"):
        await jobs.executor(timeout_s=0.1).start("both", 2)
    assert [job.index for job in jobs.workers] == [0]
    assert read_deployment(jobs.deployment.path).num_workers == 1


async def test_none_is_ended_beside_its_successor(jobs: ListedJobs) -> None:
    jobs.submit(Path(), "--array=0,1")
    jobs.submit(Path(), "--array=0")
    with pytest.raises(ServiceError, match="a worker and its successor are both there"):
        await jobs.executor().stop(LEAVES)
    assert len(jobs.workers) == 3


async def test_a_planner_that_ends_waits_for_nothing_and_leaves_the_jobs(jobs: ListedJobs) -> None:
    jobs.can_serve = False
    start = asyncio.create_task(jobs.executor().start("both", 2))
    await eventually(lambda: len(jobs.workers) == 2)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 60)
    assert len(jobs.workers) == 2
