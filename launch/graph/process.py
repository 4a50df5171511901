"""One instance of a service as a child process."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.config.sources import env_name
from tandem.launch.graph.plan import ServicePlan
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.sdk.service.config import CONFIG_VARIABLE

RUNTIME_SECTION = "runtime."
METRICS_PORT = "runtime.metrics_port"
ADDRESSES = ("runtime.namespace", "runtime.nats_url", "runtime.etcd_endpoints")


class ServiceProcess(ManagedProcess):
    """Starts `tandem.sdk.service.process`; its cluster and settings stand in its environment."""

    def __init__(
        self,
        plan: ServicePlan,
        graph: str,
        config: EffectiveConfig,
        settings_path: Path,
        run_dir: Path,
    ) -> None:
        super().__init__(plan.name, plan.where, run_dir)
        self.plan = plan
        self._graph = graph  # module:Class
        self._config = config
        self._settings_path = settings_path

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in inherited.items() if k != env_name(METRICS_PORT)}
        return {
            **kept,
            "PYTHONUNBUFFERED": "1",
            CONFIG_VARIABLE: str(self._settings_path),
            **runtime_variables(self._config),
            **self.plan.variables,
        }

    def _command(self) -> list[str]:
        # -P: the working directory is where the author's modules are, behind Tandem's own
        command = [sys.executable, "-P", "-m", "tandem.sdk.service.process", self._graph]
        return [*command, "--service", self.plan.service]


def runtime_variables(config: EffectiveConfig) -> dict[str, str]:
    """The environment from which a process of the kit finds this config's cluster."""
    keys = [key for key in config.settings if key.startswith(RUNTIME_SECTION)]
    keys = [key for key in keys if key != METRICS_PORT]  # which the plan deals out
    variables: dict[str, str] = {}
    for key in dict.fromkeys([*keys, *ADDRESSES]):
        value = config.value(key)
        plain = value.get_secret_value() if hasattr(value, "get_secret_value") else value
        variables[env_name(key)] = "null" if plain is None else str(plain)
    return variables
