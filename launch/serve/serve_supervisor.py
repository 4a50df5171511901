"""`tandem serve`: the roles of one topology as children of the supervisor."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from tandem.config.model import EffectiveConfig
from tandem.config.sources import Setting
from tandem.config.topology import Topology, load_topology, workers_topology
from tandem.launch.run.options import LaunchOptions, ModelOptions
from tandem.launch.run.roles import find_model
from tandem.launch.serve.control import Control
from tandem.launch.serve.known import until_known
from tandem.launch.serve.plan import RolePlan, make_plan
from tandem.launch.serve.role_process import planner_process, role_process
from tandem.launch.serve.rollout import Rollout
from tandem.launch.supervise.supervisor import Supervisor, local_instance, local_pid, with_free_port
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import list_gpus, num_usable_cores
from tandem.runtime.local.local_clusters import LocalCluster
from tandem.runtime.process.http_server import listen
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.store.discovery import WatchView, instances_prefix
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.store.progress_report import ProgressReport, watch_progress

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
        self._control = Control(self._roll_out)

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        plan = make_plan(self._topology, self._config, list_gpus(), num_usable_cores())
        self._disagg = plan.roles[0].config.config.disagg
        self._frontend = plan.roles[-1].config.config.frontend
        for note in plan.notes:
            self._report.note(note)
        for role in plan.roles:
            if role.role == "frontend":
                role = self._with_listener(role)
            await self._start_child(
                role_process(role, self._run_dir, self._model, self._model_name)
            )
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

    async def _roll_out(self, say: Callable[[str], None]) -> None:
        assert self._instances is not None, "the control socket is there once all are ready"

        def note(text: str) -> None:
            self._report.note(text)
            say(text)

        rollout = Rollout(
            self._children,
            self._instances,
            self._config.config.runtime,
            self._options.start_timeout_s,
            self._frontend.keep_alive_s,
            note,
        )
        await rollout.run()

    def _cluster(self) -> LocalCluster:
        return replace(super()._cluster(), control=str(self._control.path))

    async def _shutdown(self) -> None:
        await self._control.close()
        if self._listener is not None:
            self._listener.close()  # the frontend has it as well, until it ends
        await super()._shutdown()

    async def _until_ready(self, view: WatchView) -> None:
        workers = {child.pid for child in self._children if child.kind in WORKER_KINDS}
        await view.wait_for(
            lambda items: workers <= {local_pid(value) for value in items.values()},
            self._options.start_timeout_s,
        )
        local = (local_instance(value) for value in view.items.values())
        own = [instance for instance in local if instance and instance.pid in workers]
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
