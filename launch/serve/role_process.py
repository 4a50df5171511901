"""One role as a child process, and its config file."""

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tandem.launch.serve.plan import RolePlan
from tandem.launch.supervise.managed_process import ManagedProcess


class RoleProcess(ManagedProcess):
    """Starts a role with `tandem ROLE --config FILE`."""

    def __init__(self, plan: RolePlan, model: str, model_name: str, run_dir: Path) -> None:
        super().__init__(plan.name, plan.device.name if plan.device else "CPU", run_dir)
        self.plan = plan
        self._config_path = run_dir / f"{plan.name}.yaml"
        self._model = model
        self._model_name = model_name

    def _write_files(self) -> None:
        self._config_path.touch(mode=0o600)
        self._config_path.write_text(yaml.safe_dump(self.plan.config_sections(), sort_keys=False))

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        return self.plan.environment(inherited)

    def _command(self) -> list[str]:
        # -P: the working directory may hold folders named like packages
        command = [sys.executable, "-P", "-m", "tandem.launch", self.plan.role]
        if self.plan.role != "frontend":
            command += [self._model, "--served-model-name", self._model_name]
        return [*command, "--config", str(self._config_path)]
