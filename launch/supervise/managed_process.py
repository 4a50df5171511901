"""A child of the supervisor that can be started again after it died, and how often it may be."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.fork_server import ForkServer

FIRST_DELAY_S = 0.5
MAX_RESTARTS = 6  # in a row, that is without STEADY_S of life between two of them
STEADY_S = 60.0


@dataclass(slots=True)
class Backoff:
    """Waits twice as long before every restart, and gives up after MAX_RESTARTS in a row."""

    num_restarts: int = 0

    def next_delay_s(self, lived_s: float) -> float | None:
        """Return the wait before the restart of a process that lived so long; None: give up."""
        if lived_s >= STEADY_S:
            self.num_restarts = 0
        if self.num_restarts >= MAX_RESTARTS:
            return None
        self.num_restarts += 1
        return float(FIRST_DELAY_S * 2 ** (self.num_restarts - 1))


class ManagedProcess:
    """A command that can be started again; `start` returns before the process is ready.

    `kind`: the role or service that it is an instance of. `placement`: its GPU or CPU, for users.
    `forks`: what starts it at once, where it can.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        run_dir: Path,
        *,
        placement: str,
        pass_fds: Collection[int] = (),
        forks: ForkServer | None = None,
    ) -> None:
        self.name = name  # decode-0
        self.kind = kind  # decode
        self.placement = placement
        self.log_path = run_dir / f"{name}.log"
        self.announced_pid: int | None = None  # of the last process reported as ready
        self._command = command
        self._environment = environment
        self._pass_fds = pass_fds
        self.forks = forks
        self._child: ChildProcess | None = None

    @property
    def child(self) -> ChildProcess:
        """The process of the last start. Raise ServiceError before `start`."""
        if self._child is None:
            raise ServiceError(f"{self.name} was not started")
        return self._child

    @property
    def pid(self) -> int | None:
        """None while the process is not running."""
        return self._child.pid if self._child and self._child.exit_code is None else None

    async def start(self) -> None:
        self._child = await self.start_successor()

    async def start_successor(self) -> ChildProcess:
        """Start another process of this command, beside the present one."""
        if self.forks is not None:
            with contextlib.suppress(ServiceError):
                return await self.forks.start(self._command, self.log_path, self._environment)
        return await ChildProcess.start(
            self._command, self.log_path, env=self._environment, pass_fds=self._pass_fds
        )

    def adopt(self, successor: ChildProcess) -> ChildProcess:
        """Put a process in the place of the present one, which is returned: the caller ends it."""
        elder, self._child = self.child, successor
        return elder

    async def stop(self, timeout_s: float, on_kill: Callable[[str], None]) -> None:
        """Let the process drain; after `timeout_s` kill it and report that to `on_kill`."""
        if self.pid is not None and not await self.child.stop(timeout_s):
            on_kill(f"{self.name} did not drain in {timeout_s:.0f} s and was killed")

    def kill(self) -> None:
        if self.pid is not None:
            self.child.kill()
