"""Starting and ending workers for the planner."""

import socket
from pathlib import Path
from typing import Protocol

from tandem.launch.serve.control import command
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.local_clusters import running_cluster_at
from tandem.runtime.wire.cluster_messages import Instance, WorkerRole


class Executor(Protocol):
    """Starts and ends workers; both raise ServiceError with a sentence for the operator."""

    async def start(self, role: WorkerRole, count: int) -> str:
        """Start so many workers, and return their names once they serve."""

    async def stop(self, worker: Instance) -> None:
        """Let a worker drain, and return when it has ended."""


class LocalExecutor:
    """The supervisor of the `tandem serve` that runs this cluster on this machine."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self._runtime = runtime

    async def start(self, role: WorkerRole, count: int) -> str:
        return await command(self._socket(), f"start {role} {count}")

    async def stop(self, worker: Instance) -> None:
        if worker.host != socket.gethostname():
            raise ServiceError(f"worker {worker.instance_id} runs at {worker.host}, not here")
        await command(self._socket(), f"stop {worker.pid}")

    def _socket(self) -> Path:
        cluster = running_cluster_at(self._runtime.etcd_endpoints, self._runtime.namespace)
        if cluster is None or not cluster.control:
            raise ServiceError("no `tandem serve` here runs this cluster, to start or end workers")
        return Path(cluster.control)
