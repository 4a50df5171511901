"""The service job of a deployment: NATS, etcd and the frontend, on an address of their node."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import uvloop

from tandem.config.model import EffectiveConfig, load_config
from tandem.config.planner import PlannerConfig
from tandem.config.sources import Setting
from tandem.launch.run.options import LaunchOptions
from tandem.launch.serve.plan import plan_frontend
from tandem.launch.serve.role_process import role_process
from tandem.launch.slurm.deployment import ORIGIN, Deployment, read_deployment
from tandem.launch.slurm.turn import Turn
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.network_servers import NetworkEtcd, NetworkNats
from tandem.launch.supervise.slurm_commands import controller_host
from tandem.launch.supervise.supervisor import Supervisor, with_free_port
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.local_servers import LocalServer
from tandem.runtime.own_address import ROUTE, address_towards, own_address
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.store.etcd import EtcdDiscovery

START_TIMEOUT_S = 120.0
TAKEN_WITHIN_S = 20.0  # a turn that is given away; a standby may have begun just now
WORKERS_WITHIN_S = 20.0  # the workers come to the services that have the turn


class ServiceSupervisor(Supervisor):
    """Runs the services until a signal ends it, and gives their addresses when it has the turn.

    Of several service jobs one has the turn; the others stand by, with services that run.
    """

    def __init__(self, config: EffectiveConfig, reporter: Reporter, deployment: Deployment) -> None:
        options = LaunchOptions(start_timeout_s=START_TIMEOUT_S)
        super().__init__(config, options, reporter)
        self._turn = Turn(deployment.services_file, os.environ.get("SLURM_JOB_ID", ""))
        self._deployment = deployment

    def _own_servers(self) -> dict[str, LocalServer]:
        runtime = self._config.config.runtime
        return {
            "runtime.nats_url": NetworkNats(self._run_dir, runtime),
            "runtime.etcd_endpoints": NetworkEtcd(self._run_dir, runtime),
        }

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        await self._start_child(role_process(plan_frontend(self._config), self._run_dir))
        await self._unless_one_dies(self._until_answers("/live"))

    def _is_announced(self) -> bool:
        return False

    def _drain_order(self) -> Sequence[str]:
        return ("planner", "frontend")

    def _report_ready(self) -> None:
        self._report.done(f"the services run, with a frontend at {self._http_url()}")

    async def _keep_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(super()._keep_all())
                group.create_task(self._serve())
        except* ServiceError as failures:
            raise failures.exceptions[0] from None

    async def _serve(self) -> None:
        """Wait for the turn and give the addresses. Raise ServiceError when the turn is lost."""
        await self._turn.until_mine()
        runtime = self._config.config.runtime
        if (left_url := await self._turn.left_url()) is not None:
            self._turn.take(runtime.nats_url, runtime.etcd_endpoints, left_url)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORKERS_WITHIN_S):
                    await self._until_answers("/health")
        self._turn.take(runtime.nats_url, runtime.etcd_endpoints, self._http_url())
        self._report.done(f"serving at {self._http_url()}")
        if self._deployment.has_planner:
            planner = _planner_process(self._deployment, self._config.config.planner)
            await self._start_child(planner)
            self._keep_up(planner)
        other = await self._turn.until_lost()
        raise ServiceError(f"job {other.job_id} has taken over: it serves at {other.http_url}")

    async def _shutdown(self) -> None:
        if self._num_signals and self._turn.hand_over():
            with contextlib.suppress(TimeoutError, TandemError):  # its own end comes in any case
                await self._until_another_serves()
        await super()._shutdown()

    async def _until_another_serves(self) -> None:
        """Let a job that stands by have the workers; this one's frontend answers meanwhile.

        It knows its workers, and they it, without services. Raise TimeoutError where no job comes.
        """
        if not read_deployment(self._deployment.path).has_standby:
            return
        async with asyncio.timeout(TAKEN_WITHIN_S):
            await self._turn.until_lost()
        for server in reversed(self._servers):  # now workers look for those of the other job
            await server.stop()
        async with asyncio.timeout(WORKERS_WITHIN_S):
            await self._turn.until_answered_elsewhere(self._http_url())


def run_service(folder: Path) -> int:
    """Run the services of the deployment in `folder` until a signal; return the exit code."""
    deployment = read_deployment(folder)
    config = load_config(file=folder / "config.yaml", environment=os.environ)
    host = _host(deployment.interface)
    own = [Setting("runtime.host", host, ORIGIN), Setting("frontend.host", host, ORIGIN)]
    config = with_free_port(config.with_defaults(own))
    with Reporter() as reporter:
        return uvloop.run(ServiceSupervisor(config, reporter, deployment).run())


def _planner_process(deployment: Deployment, config: PlannerConfig) -> ManagedProcess:
    """Return the process `tandem slurm planner`, whose log is in the state folder.

    It has this job's environment, which is that of the workers it submits.
    """
    assert config.max_workers is not None, "`up` asks for it"
    words = [*deployment.launch, "slurm", "planner", "--state-dir", deployment.folder]
    words += ["--mode", config.mode, "--min-workers", str(config.min_workers)]
    words += ["--max-workers", str(config.max_workers)]
    folder = deployment.path / "logs"
    return ManagedProcess("planner", "planner", words, os.environ, folder, placement="CPU")


def _host(interface: str) -> str:
    """Return the address of an interface, or that on the route to Slurm's controller.

    Raise ServiceError without one that other hosts can dial.
    """
    try:
        if interface != ROUTE:
            return own_address(interface, ())
        controller = controller_host()
        address = address_towards(controller)
    except ValueError as error:
        raise ServiceError(f"--interface: {error}") from error
    if address is None or address.startswith("127.") or address == "::1":
        raise ServiceError(
            f"no address of this node leads to Slurm's controller {controller}: give --interface"
        )
    return address
