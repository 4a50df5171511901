"""One instance of a service as a child process."""

import os
import sys
from pathlib import Path

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.graph.plan import ServicePlan
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.runtime.names import variable_name
from tandem.sdk.service.config import CONFIG_VARIABLE

RUNTIME_SECTION = "runtime."
METRICS_PORT = "runtime.metrics_port"
ADDRESSES = ("runtime.namespace", "runtime.nats_url", "runtime.etcd_endpoints")


def service_process(
    plan: ServicePlan, graph: str, config: EffectiveConfig, settings_path: Path, run_dir: Path
) -> ManagedProcess:
    """Return the process of one instance of a service of the graph `module:Class`.

    Its cluster is in its environment, and so is the path of the services' settings.
    """
    # -P: the author's modules are in the working directory, which must come after Tandem's own
    command = [sys.executable, "-P", "-m", "tandem.sdk.service.process", graph]
    environment = {
        **{k: v for k, v in os.environ.items() if k != variable_name(METRICS_PORT)},
        "PYTHONUNBUFFERED": "1",
        CONFIG_VARIABLE: str(settings_path),
        **runtime_variables(config),
        **plan.variables,
    }
    command += ["--service", plan.service]
    return ManagedProcess(
        plan.name, plan.service, command, environment, run_dir, placement=plan.placement
    )


def runtime_variables(config: EffectiveConfig) -> dict[str, str]:
    """Return the environment from which a service's process finds this config's cluster."""
    keys = [key for key in config.settings if key.startswith(RUNTIME_SECTION)]
    keys = [key for key in keys if key != METRICS_PORT]  # every instance has its own, in its plan
    return config.variables([*keys, *ADDRESSES])
