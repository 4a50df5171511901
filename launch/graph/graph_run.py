"""From the words of `tandem run` to a checked graph: its cluster, settings and processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.launch.cli.session import Session
from tandem.launch.config.model import EffectiveConfig, section_names
from tandem.launch.devices import list_gpus, num_usable_cores, usable_memory_bytes
from tandem.launch.graph.plan import Machine, ServicePlan, plan_services
from tandem.launch.graph.settings import needs_of, read_services
from tandem.runtime.errors import ConfigError
from tandem.sdk.service.config import ServiceConfig
from tandem.sdk.service.dependencies import graph_of, known_services
from tandem.sdk.service.spec import ServiceSpec, settings_of
from tandem.sdk.worker.system_server import system_port
from tandem.sdk.worker.targets import load_class


@dataclass(frozen=True, slots=True)
class GraphRun:
    """A graph that can be started; callees come first in `specs`."""

    graph: str  # module:Class
    config: EffectiveConfig
    settings: ServiceConfig
    specs: Sequence[ServiceSpec]
    plans: Sequence[ServicePlan]


def read_graph_run(session: Session, graph: str, services_file: Path | None) -> GraphRun:
    """Load the graph and plan its processes. Raises ConfigError."""
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
