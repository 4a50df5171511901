"""A topology of this machine: started, found, its CPU time read, ended."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.bench.load.live_config import STATUS_TIMEOUT_S
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.local_clusters import LocalCluster, running_clusters
from tandem.runtime.membership.instance_report import ask_worker
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.discovery import read_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Role

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
ROLES: tuple[Role, ...] = ("frontend", "decode", "prefill")


@dataclass(frozen=True, slots=True)
class ServedStack:
    """A running topology: its cluster and the processes of each role."""

    cluster: LocalCluster
    processes: Mapping[Role, Sequence[psutil.Process]]

    @property
    def url(self) -> str:
        return self.cluster.http_url

    async def late_share(self) -> float:
        """Return how late the steps of the latest emulated worker were; 0 for real ones.

        Raises ServiceError without a worker, or for one that does not say.
        """
        config = _config_of(self.cluster)
        shares: list[float] = []
        client = RequestClient(config, new_id())
        try:
            async with started(EtcdDiscovery(config)) as discovery:
                found = await read_instances(discovery, config.namespace, ["decode", "prefill"])
            for instance in found.values():
                report = await ask_worker(client, instance, STATUS_TIMEOUT_S)
                if report.worker is None:
                    raise ServiceError(f"worker {instance.instance_id}: {report.state}")
                shares.append(float(report.worker.details.get("late_share", 0.0)))
        finally:
            await client.close()
        if not shares:
            raise ServiceError(f"no worker of {self.cluster.namespace} is found in etcd")
        return max(shares)

    def cpu_s(self) -> dict[Role, float]:
        """Return the CPU seconds, user and system, of each role's processes so far."""
        return {
            role: sum(sum(process.cpu_times()[:2]) for process in processes)
            for role, processes in self.processes.items()
        }


@contextlib.asynccontextmanager
async def served(
    model: Path, topology: str | None, flags: Sequence[str], run_dir: Path
) -> AsyncIterator[ServedStack]:
    """Run `tandem serve` of a topology, or of its default, on a free port while the body runs.

    `run_dir` is a folder for logs, which is made. Raises ServiceError with the end of the
    launcher's log when it does not become ready.
    """
    await asyncio.to_thread(run_dir.mkdir, mode=0o700, parents=True, exist_ok=True)
    child = await ChildProcess.start(
        [
            *(sys.executable, "-m", "tandem.launch", "serve", str(model)),
            *(() if topology is None else ("--topology", topology)),
            *("--port", "0", "--run-dir", str(run_dir), *flags),
        ],
        run_dir / "serve.log",
        env={**os.environ, "PATH": _search_path()},
    )
    try:
        cluster = await _ready(child)
        yield ServedStack(cluster, await _processes(cluster))
    finally:
        await child.stop(STOP_TIMEOUT_S)


def _search_path() -> str:
    """Return PATH with the programs of packages that lie on the module path alone."""
    folders = [str(Path(entry) / "bin") for entry in sys.path if (Path(entry) / "bin").is_dir()]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])


async def _ready(child: ChildProcess) -> LocalCluster:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while child.exit_code is None:
                for cluster in running_clusters():
                    if cluster.pid == child.pid:
                        return cluster
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        reason = f"was not ready after {START_TIMEOUT_S:g} s"
    else:
        reason = f"exited with {child.exit_code}"
    raise ServiceError(f"tandem serve {reason}; its log ends:\n{child.log_tail()}")


async def _processes(cluster: LocalCluster) -> dict[Role, list[psutil.Process]]:
    config = _config_of(cluster)
    found: dict[Role, list[psutil.Process]] = {}
    async with started(EtcdDiscovery(config)) as discovery:
        for role in ROLES:
            instances = await read_instances(discovery, cluster.namespace, [role])
            if pids := {instance.pid for instance in instances.values()}:
                found[role] = [psutil.Process(pid) for pid in sorted(pids)]
    return found


def _config_of(cluster: LocalCluster) -> RuntimeConfig:
    """Return what leads to a cluster, whether it is still listed on this machine or not."""
    return RuntimeConfig.model_validate(cluster.runtime_values())
