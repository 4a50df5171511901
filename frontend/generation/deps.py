"""The parts of a frontend that the generation of every request uses."""

from dataclasses import dataclass

from tandem.frontend.access.named_worker import NamedWorkers
from tandem.frontend.access.room import Room
from tandem.frontend.catalog.catalog import Catalog
from tandem.frontend.config import FrontendConfig
from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.ui.recent import Recent
from tandem.router.policy import Router
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.tracing.trace import TraceFile


@dataclass(slots=True)
class FrontendDeps:
    """The parts of one frontend."""

    config: FrontendConfig
    catalog: Catalog
    client: RequestClient
    router: Router
    metrics: FrontendMetrics
    recent: Recent
    trace: TraceFile
    named_workers: NamedWorkers
    waiting: Room  # of new sequences that wait for a worker to return
