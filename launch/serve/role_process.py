"""One role as a child process, and its config file."""

import os
import sys
from pathlib import Path

import yaml

from tandem.launch.serve.plan import RolePlan
from tandem.launch.supervise.managed_process import ManagedProcess


def role_process(
    plan: RolePlan, run_dir: Path, model: Path | None = None, model_name: str = ""
) -> ManagedProcess:
    """Return the process `tandem ROLE --config FILE`, with the file written.

    Workers need a model's folder and served name, a frontend needs neither.
    """
    config_path = run_dir / f"{plan.name}.yaml"
    config_path.touch(mode=0o600)
    config_path.write_text(yaml.safe_dump(plan.config_sections(), sort_keys=False))
    # -P: the working directory may have folders named like packages
    command = [sys.executable, "-P", "-m", "tandem.launch", plan.role]
    if plan.role != "frontend":
        command += [str(model), "--served-model-name", model_name]
    command += ["--config", str(config_path)]
    placement = plan.device.name if plan.device else "CPU"
    environment = plan.environment(os.environ)
    return ManagedProcess(plan.name, plan.role, command, environment, run_dir, placement=placement)
