"""One role as a child process, and its config file."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import yaml

from tandem.config.model import EffectiveConfig
from tandem.launch.run.roles import SPIN_COUNT
from tandem.launch.serve.plan import RolePlan, plan_frontend
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.runtime.local.fork_server import ForkServer

# What a worker has imported when it serves, less what opens a transport or asks for a GPU.
MODULES = (
    "tandem.launch.cli.main",
    "tandem.launch.run.roles",
    "tandem.worker.worker",
    "tandem.decode.worker",
    "tandem.prefill.worker",
    "tandem.engine.execution.model_runner",
)


def role_process(
    plan: RolePlan,
    run_dir: Path,
    model: Path | None = None,
    model_name: str = "",
    forks: ForkServer | None = None,
) -> ManagedProcess:
    """Return the process `tandem ROLE --config FILE`, with the file written.

    Workers need a model's folder and served name, a frontend needs neither.
    """
    if plan.role == "frontend":
        return _process(plan, plan.role, [], run_dir)
    if forks is not None and not _can_be_fork(plan, forks):
        forks = None
    arguments = [str(model), "--served-model-name", model_name]
    return _process(plan, plan.role, arguments, run_dir, forks)


def fork_server(plans: Iterable[RolePlan], run_dir: Path) -> ForkServer | None:
    """Return a fork server for workers on a CPU; None where they cannot share their imports.

    Libraries read the number of threads as they are loaded, so it must be one for all. Emulated
    workers load no PyTorch, and a paced clock must be set before any import.
    """
    workers = [each for each in plans if each.role != "frontend"]
    environment = {"GOMP_SPINCOUNT": str(SPIN_COUNT), **workers[0].environment(os.environ)}
    forks = ForkServer(MODULES, environment, run_dir / "forks.log")
    return forks if all(_can_be_fork(each, forks) for each in workers) else None


def _can_be_fork(plan: RolePlan, forks: ForkServer) -> bool:
    config = plan.config.config
    computes = config.engine.emulate is None and config.runtime.pace == 1
    return not plan.gpus and computes and plan.variables.items() <= forks.environment.items()


def planner_process(config: EffectiveConfig, run_dir: Path) -> ManagedProcess:
    """Return the process `tandem planner --config FILE`, with the file written."""
    return _process(replace(plan_frontend(config), name="planner-0"), "planner", [], run_dir)


def _process(
    plan: RolePlan,
    command: str,
    arguments: list[str],
    run_dir: Path,
    forks: ForkServer | None = None,
) -> ManagedProcess:
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
        forks=forks,
    )
