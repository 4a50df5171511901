"""A child of the launcher that may die and come back: its log, and how often it may."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.launch.supervise.processes import LOG_TAIL_LINES, ChildProcess, log_tail
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


class ManagedProcess(ABC):
    """Starts one command, with what it needs beside it; can be started again after it died."""

    def __init__(self, name: str, where: str, run_dir: Path) -> None:
        self.name = name  # decode-0
        self.where = where  # for the user: its GPU, or CPU
        self.log_path = run_dir / f"{name}.log"
        self.backoff = Backoff()
        self.announced_pid: int | None = None  # the last one the user was told to be ready
        self._child: ChildProcess | None = None
        self._started = 0.0

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]: ...

    def _write_files(self) -> None:
        """What its command reads; written before every start."""
        return

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
        self._write_files()
        self._started = time.perf_counter()
        self._child = await ChildProcess.start(
            self.name, self._command(), self.log_path, env=self._environment(os.environ)
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


def describe_exit(code: int) -> str:
    """`exited with 1` or `was killed by signal 9`."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
