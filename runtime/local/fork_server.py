"""Processes that start at once: forks of one that has imported their modules."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess, spawn
from tandem.runtime.local.deathwatch import prctl
from tandem.runtime.local.forked import MAX_MESSAGE_BYTES, Order

PR_SET_CHILD_SUBREAPER = 36
ANSWER_TIMEOUT_S = 60.0  # the first comes when all is imported


class ForkServer:
    """Starts children as forks of a helper process that has imported some modules.

    They become children of this process, like those that it starts by their commands. The helper
    runs in the environment that is given here, and `close` ends it.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self.environment = environment
        self._modules, self._log_path = modules, log_path
        self._forks: _Forks | None = None

    def prepare(self) -> None:
        """Start the helper, whose imports take seconds. Call it in the main thread."""
        if self._forks is None:
            self._forks = _Forks(self._modules, self.environment, self._log_path)

    async def start(
        self, command: Sequence[str], log_path: Path, env: Mapping[str, str]
    ) -> ChildProcess:
        """Start a command `PYTHON ... -m MODULE ARGUMENTS`, as `ChildProcess.start` does.

        What libraries read when they are loaded they have read from the constructor's environment.
        Raise ServiceError where no fork is to be had.
        """
        self.prepare()
        forks = self._forks
        assert forks is not None
        module, *arguments = command[command.index("-m") + 1 :]
        order = Order(module, arguments, dict(env))
        try:
            pid = await asyncio.to_thread(forks.start, order, log_path)
        except (OSError, msgspec.DecodeError) as error:
            self.close()
            raise ServiceError(f"no fork, see {self._log_path}: {error}") from error
        return ChildProcess(_Fork(pid), log_path)

    def close(self) -> None:
        """End the helper. Children live on, and the next start begins with a new helper."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None


class _Forks:
    """The process that forks, and its answers, one at a time."""

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        program = ["-P", "-m", "tandem.runtime.local.forked"]
        with theirs, log_path.open("ab") as log:
            fd = theirs.fileno()
            self._popen = spawn(
                [sys.executable, *program, str(os.getpid()), str(fd), *modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[fd],
            )

    def start(self, order: Order, log_path: Path) -> int:
        """Return the process id of a child that has its own session. Raise OSError without one."""
        with self._lock, _adopting_orphans(), log_path.open("ab") as log:
            socket.send_fds(self._connection, [msgspec.msgpack.encode(order)], [log.fileno()])
            if not (answer := self._connection.recv(MAX_MESSAGE_BYTES)):
                raise ConnectionResetError("the process that forks has ended")
            return msgspec.msgpack.decode(answer, type=int)

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        with self._lock:  # nobody reads any more
            self._connection.close()


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants whose own parent dies while the block runs."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


class _Fork:
    """A child that `subprocess` does not know, with the methods of a Popen that are needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        code = self._waited(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _waited(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code
