"""One role as a child process: its config file, its log, and how often it may come back."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tandem.launch.plan import RolePlan
from tandem.launch.processes import LOG_TAIL_LINES, ChildProcess, log_tail
from tandem.runtime.errors import ServiceError

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
MAX_RESTARTS = 6  # in a row, that is without STEADY_S of life between two of them
STEADY_S = 60.0


@dataclass(slots=True)
class Backoff:
    """Waits twice as long before every restart, and gives up after MAX_RESTARTS in a row."""

    num_restarts: int = 0

    def next_delay_s(self, lived_s: float) -> float | None:
        """The wait before the next start of a process that lived so long; None: give up."""
        if lived_s >= STEADY_S:
            self.num_restarts = 0
        if self.num_restarts >= MAX_RESTARTS:
            return None
        self.num_restarts += 1
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.num_restarts - 1)))


class RoleProcess:
    """Starts a role with `tandem ROLE --config FILE`; can be started again after it died."""

    def __init__(self, plan: RolePlan, model: str, model_name: str, run_dir: Path) -> None:
        self.plan = plan
        self.name = plan.name
        self.log_path = run_dir / f"{plan.name}.log"
        self.backoff = Backoff()
        self.announced_pid: int | None = None  # the last one the user was told to be ready
        self._config_path = run_dir / f"{plan.name}.yaml"
        self._model = model
        self._model_name = model_name
        self._child: ChildProcess | None = None
        self._started = 0.0

    @property
    def child(self) -> ChildProcess | None:
        return self._child

    @property
    def pid(self) -> int | None:
        """None when it is not running."""
        child = self._child
        return child.pid if child is not None and child.exit_code is None else None

    @property
    def lived_s(self) -> float:
        return time.perf_counter() - self._started

    async def start(self) -> None:
        self._config_path.touch(mode=0o600)
        self._config_path.write_text(yaml.safe_dump(self.plan.config_sections(), sort_keys=False))
        self._started = time.perf_counter()
        self._child = await ChildProcess.start(
            self.name, self._command(), self.log_path, env=self.plan.environment(os.environ)
        )

    async def wait(self) -> int:
        """Its exit code, when it has ended. Raises ServiceError before `start`."""
        if self._child is None:
            raise ServiceError(f"{self.name} was not started")
        return await self._child.wait()

    async def stop(self, timeout_s: float, on_kill: Callable[[str], None]) -> None:
        """Lets it drain; kills it after `timeout_s` and says so to `on_kill`."""
        if self._child is None or self._child.exit_code is not None:
            return
        if not await self._child.stop(timeout_s):
            on_kill(f"{self.name} did not drain in {timeout_s:.0f} s and was killed")

    def kill(self) -> None:
        if self._child is not None and self._child.exit_code is None:
            self._child.kill()

    def tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its log."""
        return log_tail(self.log_path, num_lines)

    def _command(self) -> list[str]:
        # -P: the working directory may hold folders named like packages
        command = [sys.executable, "-P", "-m", "tandem.launch", self.plan.role]
        if self.plan.role != "frontend":
            command += [self._model, "--served-model-name", self._model_name]
        return [*command, "--config", str(self._config_path)]


def describe_exit(code: int) -> str:
    """`exited with 1` or `was killed by signal 9`."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
