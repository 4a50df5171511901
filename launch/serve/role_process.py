"""One role as a child process, and its config file."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from tandem.config.model import EffectiveConfig
from tandem.launch.serve.plan import RolePlan, plan_frontend
from tandem.launch.supervise.managed_process import ManagedProcess


def role_process(
    plan: RolePlan, run_dir: Path, model: Path | None = None, model_name: str = ""
) -> ManagedProcess:
    """Return the process `tandem ROLE --config FILE`, with the file written.

    Workers need a model's folder and served name, a frontend needs neither.
    """
    arguments: list[str] = []
    if plan.role != "frontend":
        arguments = [str(model), "--served-model-name", model_name]
    return _process(plan, plan.role, arguments, run_dir)


def planner_process(config: EffectiveConfig, run_dir: Path) -> ManagedProcess:
    """Return the process `tandem planner --config FILE`, with the file written."""
    return _process(replace(plan_frontend(config), name="planner-0"), "planner", [], run_dir)


def _process(plan: RolePlan, command: str, arguments: list[str], run_dir: Path) -> ManagedProcess:
    config_path = run_dir / f"{plan.name}.yaml"
    config_path.touch(mode=0o600)
    config_path.write_text(yaml.safe_dump(plan.config_sections(), sort_keys=False))
    # -P: the working directory may have folders named like packages
    words = [sys.executable, "-P", "-m", "tandem.launch", command, *arguments]
    words += ["--config", str(config_path)]
    listen_fd = plan.config.config.frontend.listen_fd
    return ManagedProcess(
        plan.name,
        command,
        words,
        plan.environment(os.environ),
        run_dir,
        placement=plan.placement,
        pass_fds=() if listen_fd is None or plan.role != "frontend" else (listen_fd,),
    )
