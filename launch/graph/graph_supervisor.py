"""`tandem run`: the services of a graph as children of the supervisor."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from tandem.config.model import EffectiveConfig, section_names
from tandem.config.session import Session
from tandem.launch.graph.plan import Machine, ServicePlan, plan_services
from tandem.launch.graph.settings import needs_of, read_services
from tandem.launch.run.options import LaunchOptions
from tandem.launch.serve.plan import plan_frontend
from tandem.launch.serve.role_process import role_process
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.supervisor import Supervisor, local_pid, with_free_port
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import list_gpus, num_usable_cores, usable_memory_bytes
from tandem.runtime.printable import masked
from tandem.runtime.process.names import variable_name
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.store.discovery import WatchView, decode_instance, instances_prefix, readable
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.sdk.health.system_server import system_port
from tandem.sdk.service.config import CONFIG_VARIABLE, ServiceConfig
from tandem.sdk.service.dependencies import graph_of, known_services
from tandem.sdk.service.spec import ServiceSpec, settings_of
from tandem.sdk.worker.targets import load_class

METRICS_PORT = "runtime.metrics_port"
ADDRESSES = ("runtime.namespace", "runtime.nats_url", "runtime.etcd_endpoints")


@dataclass(frozen=True, slots=True)
class GraphRun:
    """A graph that can be started; callees come first in `specs`."""

    graph: str  # module:Class
    config: EffectiveConfig
    settings: ServiceConfig
    specs: Sequence[ServiceSpec]
    plans: Sequence[ServicePlan]


def read_graph_run(session: Session, graph: str, services_file: Path | None) -> GraphRun:
    """Load the graph and plan its processes. Raise ConfigError."""
    flags = session.flags
    session.flags = [flag for flag in flags if flag.section in section_names()]
    config = session.load_for_cluster()
    entry = load_class(graph)
    service_flags = [flag for flag in flags if flag.section not in section_names()]
    settings = read_services(services_file, service_flags, known_services(entry))
    specs = [spec for spec in graph_of(entry) if spec.is_enabled]
    for spec in specs:
        settings_of(spec, settings)
    machine = Machine(num_usable_cores(), usable_memory_bytes(), list_gpus())
    needs = [(spec, needs_of(spec, settings)) for spec in specs]
    plans = plan_services(needs, machine, system_port(config.config.runtime))
    if not plans:
        raise ConfigError(f"{graph}: no service of this graph is enabled")
    return GraphRun(graph, config, settings, specs, plans)


def run_graph(
    session: Session,
    options: LaunchOptions,
    graph: str,
    services_file: Path | None,
    *,
    with_frontend: bool,
) -> int:
    """Run services until a signal and return the exit code. Raise TandemError on failure."""
    run = read_graph_run(session, graph, services_file)
    if with_frontend:
        run = replace(run, config=with_free_port(run.config))
    with Reporter() as reporter:
        supervisor = GraphSupervisor(run, options, reporter, with_frontend=with_frontend)
        return uvloop.run(supervisor.run())


class GraphSupervisor(Supervisor):
    """Runs the services of a graph, with a frontend if wanted, until a signal ends it."""

    def __init__(
        self, run: GraphRun, options: LaunchOptions, reporter: Reporter, *, with_frontend: bool
    ) -> None:
        super().__init__(run.config, options, reporter)
        self._run = run
        self._specs = {spec.name: spec for spec in run.specs}
        self._with_frontend = with_frontend
        self._instances: list[ManagedProcess] = []

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        run, run_dir = self._run, self._run_dir
        settings_path = run_dir / "services.json"
        run.settings.write(settings_path)
        for plan in run.plans:
            child = service_process(plan, run.graph, self._config, settings_path, run_dir)
            self._instances.append(child)
            await self._start_child(child)
        if self._with_frontend:
            await self._start_child(role_process(plan_frontend(self._config), run_dir))
        self._report.working(f"starting {', '.join(child.name for child in self._children)}")
        views = await self._watch_instances(discovery)
        await self._unless_one_dies(self._until_ready(views))

    async def _watch_instances(self, discovery: EtcdDiscovery) -> dict[str, WatchView]:
        """Return namespace |-> the view of all instances in it."""
        namespaces = {self._namespace(spec) for spec in self._specs.values()}
        views = {name: discovery.watch(instances_prefix(name)) for name in namespaces}
        for view in views.values():
            await view.ready()
            view.subscribe(lambda key, value: self._report_ready_instances(views))
        return views

    def _report_ready_instances(self, views: Mapping[str, WatchView]) -> None:
        for child in self._instances:
            if self._is_ready(child, views):
                self._report_child_ready(child)

    def _is_ready(self, child: ManagedProcess, views: Mapping[str, WatchView]) -> bool:
        """Return True when all endpoints of the instance are registered."""
        spec = self._specs[child.kind]
        records = views[self._namespace(spec)].items.values()
        own = [record for record in records if child.pid and local_pid(record) == child.pid]
        endpoints = {each.endpoint for each in readable(own, decode_instance)}
        return child.pid is not None and spec.endpoints.keys() <= endpoints

    def _namespace(self, spec: ServiceSpec) -> str:
        return spec.namespace or self._config.config.runtime.namespace

    async def _until_ready(self, views: Mapping[str, WatchView]) -> None:
        for child in self._instances:
            await self._until_one_is_ready(child, views)
        self._report_ready_instances(views)
        if self._with_frontend:
            await self._until_answers("/live")

    async def _until_one_is_ready(
        self, child: ManagedProcess, views: Mapping[str, WatchView]
    ) -> None:
        view = views[self._namespace(self._specs[child.kind])]
        timeout_s = self._options.start_timeout_s
        await view.wait_for(lambda _: self._is_ready(child, views), timeout_s)

    def _drain_order(self) -> Sequence[str]:
        return ["frontend", *reversed(self._specs)]

    def _is_announced(self) -> bool:
        return any(server.name == "etcd" for server in self._servers)

    def _http_url(self) -> str:
        return super()._http_url() if self._with_frontend else ""

    def _report_ready(self) -> None:
        at = f" behind {self._http_url()}" if self._with_frontend else ""
        num_instances = len(self._instances)
        count = f"{num_instances} instance{'s' if num_instances > 1 else ''}"
        self._report.done(f"ready: {self._run.graph}, {count}{at}")
        runtime = self._config.config.runtime
        for spec in self._specs.values():
            for endpoint in spec.endpoints:
                self._report.note(f"endpoint {spec.address(endpoint, runtime.namespace)}")
        self._report.note(f"NATS {masked(runtime.nats_url)}, etcd {runtime.etcd_endpoints}")
        frontend = self._config.config.frontend
        if self._with_frontend and frontend.max_pages:
            self._report.note(f"live page: {frontend.page_url(self._http_url())}")
        self._report.note(f"logs: {self._run_dir}")
        self._report.note("Ctrl-C stops")


# ---- processes --------------------------------------------------------------------------------


def service_process(
    plan: ServicePlan, graph: str, config: EffectiveConfig, settings_path: Path, run_dir: Path
) -> ManagedProcess:
    """Return the process of one instance of a service of the graph `module:Class`.

    Its cluster is in its environment, and so is the path of the services' settings.
    """
    # -P: the author's modules are in the working directory, which must come after Tandem's own
    command = [sys.executable, "-P", "-m", "tandem.sdk.service.process", graph]
    command += ["--service", plan.service]
    environment = {
        **{k: v for k, v in os.environ.items() if k != variable_name(METRICS_PORT)},
        "PYTHONUNBUFFERED": "1",
        CONFIG_VARIABLE: str(settings_path),
        **runtime_variables(config),
        **plan.variables,
    }
    return ManagedProcess(
        plan.name, plan.service, command, environment, run_dir, placement=plan.placement
    )


def runtime_variables(config: EffectiveConfig) -> dict[str, str]:
    """Return the environment from which a service's process finds this config's cluster."""
    keys = [key for key in config.settings if key.startswith("runtime.")]
    keys = [key for key in keys if key != METRICS_PORT]  # every instance has its own, in its plan
    return config.variables([*keys, *ADDRESSES])
