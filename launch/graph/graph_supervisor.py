"""`tandem run`: the services of a graph as children of the supervisor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from tandem.launch.cli.options import LaunchOptions
from tandem.launch.cli.session import Session
from tandem.launch.graph.graph_run import GraphRun, read_graph_run
from tandem.launch.graph.process import service_process
from tandem.launch.serve.plan import plan_frontend
from tandem.launch.serve.role_process import role_process
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.reporter import Reporter
from tandem.launch.supervise.supervisor import Supervisor, local_pid, with_free_port
from tandem.runtime.discovery import WatchView
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.messages import Instance
from tandem.runtime.printable import masked
from tandem.sdk.service.spec import ServiceSpec


def run_graph(
    session: Session,
    options: LaunchOptions,
    graph: str,
    services_file: Path | None,
    *,
    with_frontend: bool,
) -> int:
    """Run services until a signal and return the exit code. Raises TandemError on failure."""
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
        views = {name: discovery.watch(f"/tandem/{name}/instances/") for name in namespaces}
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
        endpoints = {msgspec.json.decode(record, type=Instance).endpoint for record in own}
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
        self._report.note(f"logs: {self._run_dir}")
        self._report.note("Ctrl-C stops")
