"""`tandem serve`: the roles of one topology as children of the supervisor."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from tandem.config.model import EffectiveConfig
from tandem.config.sources import Setting
from tandem.config.topology import KEYS_OF_ROLES, Topology, load_topology, workers_topology
from tandem.launch.run.options import LaunchOptions, ModelOptions
from tandem.launch.run.roles import find_model
from tandem.launch.serve.control import Control, Say
from tandem.launch.serve.known import until_known
from tandem.launch.serve.plan import LaunchPlan, RolePlan, make_plan, plan_one_more
from tandem.launch.serve.role_process import fork_server, planner_process, role_process
from tandem.launch.serve.rollout import Rollout
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.supervisor import Supervisor, local_instance, local_pid, with_free_port
from tandem.runtime.errors import ConfigError, NotFoundError
from tandem.runtime.local.devices import list_gpus, num_usable_cores
from tandem.runtime.local.fork_server import ForkServer
from tandem.runtime.local.local_clusters import LocalCluster
from tandem.runtime.process.http_server import listen
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.store.discovery import WatchView, instances_prefix
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.store.progress_report import ProgressReport, watch_progress
from tandem.runtime.wire.cluster_messages import Instance

WORKERS_ON_A_CPU = 2
WORKER_KINDS = ("worker", "decode", "prefill")


def run_serve(
    config: EffectiveConfig,
    options: LaunchOptions,
    model: ModelOptions,
    topology: str | None,
    num_workers: int | None,
    *,
    with_planner: bool = False,
) -> int:
    """Serve until a signal and return the exit code. Raise TandemError when that fails."""
    roles = _chosen_topology(topology, num_workers)
    config = with_free_port(config)
    with Reporter() as reporter:
        reporter.note(f"looking for {model.model}")  # a download has a bar of its own
        folder, name = find_model(config, model)
        supervisor = ServeSupervisor(config, options, reporter, roles, folder, name)
        supervisor.has_planner = with_planner
        return uvloop.run(supervisor.run())


def _chosen_topology(name: str | None, num_workers: int | None) -> Topology:
    """Return a topology by name, or that of one worker per GPU, or of two on the CPU."""
    if name is None:
        return workers_topology(num_workers or len(list_gpus()) or WORKERS_ON_A_CPU)
    if num_workers is not None:
        raise ConfigError("--workers: a topology has its own counts; give one of the two")
    return load_topology(name)


class ServeSupervisor(Supervisor):
    """Runs a topology until a signal ends it."""

    def __init__(
        self,
        config: EffectiveConfig,
        options: LaunchOptions,
        reporter: Reporter,
        topology: Topology,
        model: Path,
        model_name: str,
    ) -> None:
        super().__init__(config, options, reporter)
        self._topology = topology
        self._model = model
        self._model_name = model_name
        self._disagg = config.config.disagg
        self._frontend = config.config.frontend
        self._loading: dict[str, str] = {}  # child |-> its progress
        self.has_planner = False
        self._listener: socket.socket | None = None  # of the frontend and its successors
        self._instances: WatchView | None = None
        self._plans: dict[ManagedProcess, RolePlan] = {}  # of the workers
        self._forks: ForkServer | None = None  # where workers are forks
        self._control = Control(
            {"rollout": self._roll_out, "start": self._start_workers, "stop": self._stop_worker}
        )

    async def _startup(self) -> None:
        plan = self._plan()
        self._forks = fork_server(plan.roles, self._run_dir)
        if self._forks is not None:
            self._forks.prepare()  # meanwhile NATS and etcd start
        await super()._startup()

    def _plan(self) -> LaunchPlan:
        return make_plan(self._topology, self._config, list_gpus(), num_usable_cores())

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        plan = self._plan()
        self._disagg = plan.roles[0].config.config.disagg
        self._frontend = plan.roles[-1].config.config.frontend
        for note in plan.notes:
            self._report.note(note)
        await asyncio.gather(*map(self._start_role, plan.roles))
        if self.has_planner:
            await self._start_child(planner_process(self._config, self._run_dir))
        names = ", ".join(child.name for child in self._children if child.kind in WORKER_KINDS)
        self._report.working(f"loading {self._model_name}: {names}")
        namespace = self._config.config.runtime.namespace
        view = discovery.watch(instances_prefix(namespace))
        await view.ready()
        view.subscribe(self._instance_changed)
        loading = watch_progress(discovery, namespace)
        loading.subscribe(self._progress_changed)
        await self._unless_one_dies(self._until_ready(view))
        await loading.close()
        self._instances = view
        await self._control.start()

    def _with_listener(self, frontend: RolePlan) -> RolePlan:
        """Return the plan of a frontend that accepts from a socket of this process."""
        config = frontend.config.config.frontend
        self._listener = listen(config.host, config.port, "frontend.port")
        own = Setting("frontend.listen_fd", self._listener.fileno(), "launcher")
        return replace(frontend, config=frontend.config.with_settings([own]))

    async def _start_role(self, role: RolePlan) -> ManagedProcess:
        if role.role == "frontend":
            role = self._with_listener(role)
        child = role_process(role, self._run_dir, self._model, self._model_name, self._forks)
        await self._start_child(child)
        if role.role in WORKER_KINDS:
            self._plans[child] = role
        return child

    # ---- commands -----------------------------------------------------------------------------

    async def _roll_out(self, say: Say, _: str) -> str:
        if self._forks is not None:
            self._forks.close()  # successors run the code that is there now
        return await self._rollout(say).run()

    async def _start_workers(self, say: Say, argument: str) -> str:
        """Start more workers, as `both 2`, and return their names when they serve."""
        role, _, count = argument.partition(" ")
        if (key := KEYS_OF_ROLES.get(role)) is None or not count.isdigit():
            raise ConfigError(f"start ROLE COUNT: not {argument!r}")
        machine = list_gpus(), num_usable_cores()
        plans: list[RolePlan] = []
        for _ in range(int(count)):
            beside = [*self._plans.values(), *plans]
            plans.append(plan_one_more(key, self._topology, self._config, beside, *machine))
        names = ", ".join(plan.name for plan in plans)
        self._report.note(f"{names}: asked for, starting")
        starts = (self._start_one(plan, say) for plan in plans)
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if outcome is not None:
                raise outcome
        return names

    async def _start_one(self, plan: RolePlan, say: Say) -> None:
        """Start a worker and keep it up once it serves; else end it."""
        child = await self._start_role(plan)
        is_serving = False
        try:
            await self._rollout(say).until_serving(child, child.child)
            is_serving = True
        finally:
            if not is_serving:
                child.kill()
                self._children.remove(child)
                del self._plans[child]
        self._keep_up(child)

    async def _stop_worker(self, say: Say, pid: str) -> str:
        """Let the worker with a process id drain, and return its name when it has ended."""
        child = next((each for each in self._plans if str(each.pid) == pid), None)
        if child is None:
            raise NotFoundError(f"no worker of this `tandem serve` has the process id {pid}")
        await self._let_go(child)
        del self._plans[child]
        self._report.done(f"{child.name} has ended, as asked for")
        return child.name

    def _rollout(self, say: Say) -> Rollout:
        assert self._instances is not None, "the control socket is there once all are ready"

        def note(text: str) -> None:
            self._report.note(text)
            say(text)

        return Rollout(
            self._children,
            self._instances,
            self._config.config.runtime,
            self._options.start_timeout_s,
            self._frontend.keep_alive_s,
            note,
        )

    def _cluster(self) -> LocalCluster:
        return replace(super()._cluster(), control=str(self._control.path))

    async def _shutdown(self) -> None:
        await self._control.close()
        if self._listener is not None:
            self._listener.close()  # the frontend has it as well, until it ends
        await super()._shutdown()
        if self._forks is not None:
            self._forks.close()

    async def _until_ready(self, view: WatchView) -> None:
        workers = {child.pid for child in self._children if child.kind in WORKER_KINDS}
        await view.wait_for(
            lambda items: workers <= {local_pid(value) for value in items.values()},
            self._options.start_timeout_s,
        )

        def own() -> list[Instance]:
            local = (local_instance(value) for value in view.items.values())
            return [instance for instance in local if instance and instance.pid in workers]

        await until_known(self._config.config.runtime, own)
        await self._until_answers("/health")

    def _instance_changed(self, key: str, value: bytes | None) -> None:
        pid = local_pid(value) if value is not None else None
        for child in self._children:
            if pid is not None and child.pid == pid:
                self._loading.pop(child.name, None)
                self._report_child_ready(child)

    def _progress_changed(self, _: str, report: ProgressReport | None) -> None:
        for child in self._children:
            if report is not None and report.pid == child.pid:
                self._loading[child.name] = report.line
                lines = (f"{name}: {line}" for name, line in sorted(self._loading.items()))
                self._report.progress("; ".join(lines))

    def _drain_order(self) -> Sequence[str]:
        return ("planner", "frontend", *WORKER_KINDS)

    def _report_ready(self) -> None:
        url, name = self._http_url(), self._model_name
        message = {"role": "user", "content": "Tell me a story."}
        body = msgspec.json.encode({"model": name, "messages": [message], "max_tokens": 64})
        self._report.done(f"ready: {url} serves {name} ({self._topology.description})")
        self._report.output(
            f"\ncurl {url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d '{body.decode()}'\n"
        )
        if self._frontend.max_pages:
            self._report.note(f"live page: {self._frontend.page_url(url)}")
        self._report.note(f"logs: {self._run_dir}")
        if self._topology.count("prefill"):
            self._report.note(
                f"policy {self._disagg.policy}: prompts up to "
                f"{self._disagg.max_local_prefill_length} uncached tokens stay on their decode "
                "worker; change that while serving: "
                "tandem config set disagg.max_local_prefill_length 512"
            )
        if self.has_planner:
            mode = self._config.config.planner.mode
            self._report.note(f"planner: {mode}; tandem status has its last reading")
        self._report.note("Ctrl-C stops; tandem status shows the state of every process")
