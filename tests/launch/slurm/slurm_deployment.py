"""A deployment on the test's Slurm, by the command of its users."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tandem.launch.cluster.status import planner_lines, read_cluster
from tandem.launch.slurm.deployment import read_deployment
from tandem.runtime.errors import TandemError
from tandem.runtime.local.child_process import ChildProcess
from tests.certificates import Authority
from tests.e2e.cluster import write_sensitive_model
from tests.launch.slurm.slurm_cluster import SlurmCluster, processes_of
from tests.services import eventually

COMMAND_S = 240.0


class Tandem:
    """A deployment, by the command of its users."""

    def __init__(self, slurm: SlurmCluster, state: Path) -> None:
        self.slurm, self.state = slurm, state
        self.up_s = 0.0  # how long `up` took

    @property
    def environment(self) -> dict[str, str]:
        return self.slurm.environment | {"OMP_NUM_THREADS": "1"}

    def _command(self, words: Sequence[str]) -> list[str]:
        command = [sys.executable, "-P", "-m", "tandem.launch", "slurm", *words]
        return [*command, "--state-dir", str(self.state)]

    def run(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run `tandem slurm ...` and return what it printed."""
        done = subprocess.run(
            self._command(words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert not check or done.returncode == 0, done.stderr + self.logs()
        return done

    async def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return await asyncio.to_thread(self.run, *words)

    @asynccontextmanager
    async def running(self, *words: str) -> AsyncIterator[None]:
        """Run `tandem slurm ...` meanwhile, which a signal ends."""
        log = self.state / "logs" / f"{words[0]}.log"
        process = await ChildProcess.start(self._command(words), log, env=self.environment)
        try:
            yield
        finally:
            assert await process.stop(60), process.log_tail()

    def services(self) -> dict[str, str]:
        try:
            return dict(json.loads((self.state / "services.json").read_text()))
        except (OSError, ValueError):
            return {}

    def jobs(self, name: str = "tandem-worker") -> dict[str, str]:
        """The running jobs of a name: id |-> host."""
        lines = self.slurm.run("squeue", "-h", "-r", "-t", "R", "-n", name, "-o", "%i %N")
        return dict(line.split() for line in lines.splitlines())

    def service_jobs(self) -> set[str]:
        """The service jobs that run."""
        return {*self.jobs("tandem"), *self.jobs("tandem-standby")}

    def is_ready(self, job: str, num_requeues: int) -> bool:
        """True when a service job has begun so often anew, and its services run."""
        log = (self.state / "logs" / "service.log").read_text()
        return "services run" in log.partition(f"job {job}, requeued {num_requeues} times")[2]

    def host_of_services(self) -> str:
        """The host of the service job whose turn it is."""
        job = self.services()["job_id"]
        return self.slurm.run("squeue", "-h", "-j", job, "-o", "%N").strip()

    def service_process(self) -> int:
        """The process of the service job whose turn it is."""
        pids = processes_of("tandem.launch slurm service", self.state)
        mark = f"SLURM_JOB_ID={self.services()['job_id']}\0"
        (pid,) = [pid for pid in pids if mark in Path(f"/proc/{pid}/environ").read_text()]
        return pid

    async def num_serving(self) -> int:
        """The workers that serve; 0 while the services do not answer."""
        try:
            report = await read_cluster(read_deployment(self.state).effective())
        except TandemError:
            return 0
        return sum(
            each.instance.component == "decode" and each.state == "serving"
            for each in report.instances
        )

    async def planner_lines(self) -> list[str]:
        """The last readings of the planners; none while the services do not answer."""
        try:
            return planner_lines(await read_cluster(read_deployment(self.state).effective()))
        except TandemError:
            return []

    async def until_serving(self, count: int) -> None:
        async def serve() -> bool:
            return await self.num_serving() == count

        await eventually(serve, timeout_s=120, pause_s=0.5)

    def worker_logs(self) -> str:
        """All that the workers have logged."""
        paths = self.state.glob("logs/worker-*.log")
        return "".join(path.read_text(errors="replace") for path in paths)

    def logs(self) -> str:
        paths = sorted(self.state.glob("logs/*.log"))
        return "\n".join(f"==== {path.name}\n{path.read_text()[-1500:]}" for path in paths)


@contextmanager
def deployed(slurm: SlurmCluster, folder: Path, *words: str) -> Iterator[Tandem]:
    """A deployment with TLS and a cluster token, whose state and model are in a folder."""
    model = write_sensitive_model(folder / "model")
    files = Authority(folder / "tls").issue(*(host.address for host in slurm.hosts.all))
    tls = [f"--runtime.{key}={path}" for key, path in files.items()]
    tandem = Tandem(slurm, folder / "state")
    begun_s = time.perf_counter()
    tandem.run(
        *("up", str(model), "--gpus", "0", "--notice-s", "60", *words),
        *("--time", "1:00:00", "--frontend.port=0", "--engine.max_model_len=512"),
        *("--engine.threads=1", "--disagg.policy=always_remote", *tls),
        "--planner.interval_s=1",
    )
    tandem.up_s = time.perf_counter() - begun_s
    print(f"up {' '.join(words)}: {tandem.up_s:.1f} s")
    yield tandem
    assert "cancelled" not in tandem.run("down").stderr
    assert not tandem.jobs() and not tandem.service_jobs()
