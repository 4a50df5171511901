"""`tandem run`: the services of a graph as children of the launcher."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from tandem.launch.cli.arguments import Session
from tandem.launch.config.model import EffectiveConfig, section_names
from tandem.launch.config.sources import Setting
from tandem.launch.devices import list_gpus, num_usable_cores, usable_memory_bytes
from tandem.launch.graph.plan import Machine, ServicePlan, plan_services
from tandem.launch.graph.process import ServiceProcess
from tandem.launch.graph.settings import needs_of, read_services
from tandem.launch.serve.command import make_run_dir
from tandem.launch.serve.plan import THREAD_VARIABLES, RolePlan
from tandem.launch.serve.role_process import RoleProcess
from tandem.launch.supervise.keeper import Keeper, dialled, local_pid
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.processes import free_port, require_free_port
from tandem.launch.supervise.reporter import Reporter
from tandem.runtime.discovery import WatchView
from tandem.runtime.errors import ConfigError
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.messages import Instance
from tandem.sdk.service.config import ServiceConfig
from tandem.sdk.service.dependencies import graph_of, known_services
from tandem.sdk.service.spec import ServiceSpec, settings_of
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.system_server import system_port
from tandem.sdk.worker.targets import load_class

PLAIN_VARIABLES = {
    "NATS_SERVER": "runtime.nats_url",
    "ETCD_ENDPOINTS": "runtime.etcd_endpoints",
}


@dataclass(frozen=True, slots=True)
class RunArguments:
    """What `tandem run` was asked for beside the config."""

    graph: str  # module:Class
    services_file: Path | None
    with_frontend: bool
    run_dir: Path | None
    verbose: bool
    start_timeout_s: float


def run_graph(session: Session, arguments: RunArguments) -> int:
    """Runs services until a signal; the exit code. Raises TandemError when it cannot."""
    flags = session.flags
    session.flags = [flag for flag in flags if _section(flag) in section_names()]
    config = _find_cluster(session)
    entry = load_class(arguments.graph)
    services = read_services(
        arguments.services_file,
        [flag for flag in flags if flag not in session.flags],
        known_services(entry),
    )
    specs = [spec for spec in graph_of(entry) if spec.is_enabled]
    for spec in specs:
        settings_of(spec, services)
    machine = Machine(num_usable_cores(), usable_memory_bytes(), list_gpus())
    plans = plan_services(
        [(spec, needs_of(spec, services)) for spec in specs],
        machine,
        system_port(config.config.runtime),
    )
    if not plans:
        raise ConfigError(f"{arguments.graph}: no service of this graph is enabled")
    if arguments.with_frontend:
        config = _with_free_port(config)
    with Reporter() as reporter:
        runner = GraphRunner(config, reporter, arguments, specs, plans, services)
        return uvloop.run(runner.run())


def _section(flag: str) -> str:
    return flag.removeprefix("--").partition(".")[0]


def _find_cluster(session: Session) -> EffectiveConfig:
    """The config with the addresses that were given, or those of the cluster that runs here."""
    config = session.load()
    settings: list[Setting] = []
    for name, key in PLAIN_VARIABLES.items():
        if name in os.environ:
            found = find_cluster({name: os.environ[name]})
            settings.append(Setting(key, getattr(found, key.partition(".")[2]), name))
    return config.with_defaults(settings) if settings else session.load_for_cluster()


def _with_free_port(config: EffectiveConfig) -> EffectiveConfig:
    frontend = config.config.frontend
    require_free_port(frontend.host, frontend.port, "--port")
    if frontend.port != 0:
        return config
    chosen = Setting("frontend.port", free_port(frontend.host), "launcher")
    return config.with_settings([chosen])


class GraphRunner(Keeper):
    """Runs the services of a graph, and a frontend beside them if asked, until a signal."""

    def __init__(
        self,
        config: EffectiveConfig,
        reporter: Reporter,
        arguments: RunArguments,
        specs: Sequence[ServiceSpec],
        plans: Sequence[ServicePlan],
        services: ServiceConfig,
    ) -> None:
        super().__init__(
            config,
            reporter,
            make_run_dir(arguments.run_dir),
            embed_nats=config.origin("runtime.nats_url") == "default",
            embed_etcd=config.origin("runtime.etcd_endpoints") == "default",
            is_verbose=arguments.verbose,
            start_timeout_s=arguments.start_timeout_s,
        )
        self._arguments = arguments
        self._specs = {spec.name: spec for spec in specs}  # those that are called come first
        self._plans = plans
        self._settings = services
        self._instances: list[ServiceProcess] = []
        self._frontend: RoleProcess | None = None

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        settings_path = self._run_dir / "services.json"
        self._settings.write(settings_path)
        graph = self._arguments.graph
        for plan in self._plans:
            child = ServiceProcess(plan, graph, self._config, settings_path, self._run_dir)
            self._instances.append(child)
            await self._start_child(child)
        if self._arguments.with_frontend:
            self._frontend = self._make_frontend()
            await self._start_child(self._frontend)
        self._say.working(f"starting {', '.join(child.name for child in self._children)}")
        views = await self._watch_instances(discovery)
        await self._unless_one_dies(self._until_ready(views))

    def _make_frontend(self) -> RoleProcess:
        variables = dict.fromkeys(THREAD_VARIABLES, "1")
        plan = RolePlan("frontend-0", "frontend", self._config, variables=variables)
        return RoleProcess(plan, "", "", self._run_dir)

    async def _watch_instances(self, discovery: EtcdDiscovery) -> dict[str, WatchView]:
        """Namespace |-> the view of all instances in it."""
        namespaces = {self._namespace(spec) for spec in self._specs.values()}
        views = {name: discovery.watch(f"/tandem/{name}/instances/") for name in namespaces}
        for view in views.values():
            await view.ready()
            view.subscribe(lambda key, value: self._tell_who_is_ready(views))
        return views

    def _tell_who_is_ready(self, views: Mapping[str, WatchView]) -> None:
        for child in self._instances:
            if child.announced_pid != child.pid and self._is_ready(child, views):
                child.announced_pid = child.pid
                self._say.done(f"{child.name} is ready ({child.where}, pid {child.pid})")

    def _is_ready(self, child: ServiceProcess, views: Mapping[str, WatchView]) -> bool:
        """Whether all of its endpoints are registered."""
        spec = self._specs[child.plan.service]
        records = views[self._namespace(spec)].items.values()
        mine = [msgspec.json.decode(v, type=Instance) for v in records if _is_of(child, v)]
        return child.pid is not None and spec.endpoints.keys() <= {each.endpoint for each in mine}

    def _namespace(self, spec: ServiceSpec) -> str:
        return spec.namespace or self._config.config.runtime.namespace

    async def _until_ready(self, views: Mapping[str, WatchView]) -> None:
        for child in self._instances:
            await self._until_one_is_ready(child, views)
        self._tell_who_is_ready(views)
        if self._frontend is not None:
            await self._until_answers("/live")

    async def _until_one_is_ready(
        self, child: ServiceProcess, views: Mapping[str, WatchView]
    ) -> None:
        view = views[self._namespace(self._specs[child.plan.service])]
        await view.wait_for(lambda _: self._is_ready(child, views), self._start_timeout_s)

    def _drain_order(self) -> Sequence[Sequence[ManagedProcess]]:
        """The frontend, then every service before those it calls."""
        by_service = [
            [child for child in self._instances if child.plan.service == name]
            for name in reversed(self._specs)
        ]
        return [[self._frontend] if self._frontend else [], *by_service]

    def _is_announced(self) -> bool:
        return self._embed_etcd

    def _http_url(self) -> str:
        if not self._arguments.with_frontend:
            return ""
        frontend = self._config.config.frontend
        return f"http://{dialled(frontend.host)}:{frontend.port}"

    def _report_ready(self) -> None:
        at = f" behind {self._http_url()}" if self._http_url() else ""
        count = f"{len(self._plans)} instance{'s' if len(self._plans) > 1 else ''}"
        self._say.done(f"ready: {self._arguments.graph}, {count}{at}")
        cluster = self._config.config.runtime.namespace
        for spec in self._specs.values():
            for endpoint in spec.endpoints:
                self._say.note(f"endpoint {spec.address(endpoint, cluster)}")
        runtime = self._config.config.runtime
        self._say.note(f"NATS {runtime.nats_url}, etcd {runtime.etcd_endpoints}")
        self._say.note(f"logs: {self._run_dir}")
        self._say.note("Ctrl-C stops")


def _is_of(child: ServiceProcess, instance: bytes) -> bool:
    return child.pid is not None and local_pid(instance) == child.pid
