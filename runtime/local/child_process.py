"""Child processes beside an event loop: started by vfork, killed when this process dies.

uvloop starts a process by fork, and the hooks that libraries put into fork and munmap then run in
the child: UCX takes a spin lock there, and the child hangs if another thread of the parent held
that lock. Between vfork and the program no such code runs.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from tandem.runtime.tasks import ends_within

PIPE = subprocess.PIPE
DEVNULL = subprocess.DEVNULL
DEATHWATCH = Path(__file__).with_name("deathwatch.py")
LOG_TAIL_LINES = 20
LINE_LIMIT_BYTES = 2**16


class Started(Protocol):
    """The part of `subprocess.Popen` that a ChildProcess uses."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


class ChildProcess:
    """A child in its own session, which the kernel kills when this process dies.

    Start it from the main thread: the kernel watches the thread that forked. Its own session keeps
    the terminal's Ctrl-C from it, so that its parent decides when each child stops. Pipes are
    streams of the running event loop.
    """

    def __init__(self, popen: Started, log_path: Path | None = None) -> None:
        self.pid = popen.pid
        self.log_path = log_path
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._popen = popen
        self._started = time.perf_counter()
        self._ended = asyncio.Event()
        self._end_fd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._end_fd, self._on_end)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        log_path: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Collection[int] = (),
    ) -> "ChildProcess":
        """Start a child whose output is appended to a file; it inherits `pass_fds`."""
        with log_path.open("ab") as log:
            popen = spawn(
                command, stdin=DEVNULL, stdout=log, stderr=log, env=env, cwd=cwd, pass_fds=pass_fds
            )
        return cls(popen, log_path)

    @classmethod
    async def start_piped(
        cls,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        limit: int = LINE_LIMIT_BYTES,
    ) -> "ChildProcess":
        """Start a child whose streams are each inherited, PIPE or DEVNULL.

        `limit`: the longest line that can be read from a pipe, in bytes.
        """
        popen = spawn(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
        child = cls(popen)
        if popen.stdin is not None:
            child.stdin = await _writer(popen.stdin)
        if popen.stdout is not None:
            child.stdout = await _reader(popen.stdout, limit)
        if popen.stderr is not None:
            child.stderr = await _reader(popen.stderr, limit)
        return child

    @property
    def exit_code(self) -> int | None:
        """None while the child runs; minus the signal's number when a signal ended it."""
        return self._popen.poll()

    @property
    def lived_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    async def wait(self) -> int:
        """Return the exit code once the child has ended."""
        await self._ended.wait()
        return self._popen.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the child alone. No effect when it has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the child and all processes of its session at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> bool:
        """Send SIGTERM, and kill after `timeout_s`. False when the child had to be killed."""
        self.signal(signal.SIGTERM)
        if await ends_within(self.wait(), timeout_s):
            return True
        self.kill()
        await self.wait()
        return False

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        return log_tail(self.log_path, num_lines) if self.log_path is not None else ""

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end_fd)
        os.close(self._end_fd)
        self._popen.wait()
        if self.stdin is not None:
            self.stdin.close()
        self._ended.set()


def log_tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log file; empty when there is no such file."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16384))
            lines = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-num_lines:])


def describe_exit(code: int) -> str:
    """Return `exited with 1` or `was killed by signal 9`."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def spawn(
    command: Sequence[str],
    *,
    stdin: int | None,
    stdout: int | IO[bytes] | None,
    stderr: int | IO[bytes] | None,
    env: Mapping[str, str] | None,
    cwd: Path | None = None,
    pass_fds: Collection[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a command in its own session, which the kernel kills when this process dies."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(DEATHWATCH), str(os.getpid()), *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
    )


async def _writer(pipe: IO[bytes]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop), pipe
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _reader(pipe: IO[bytes], limit: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    await loop.connect_read_pipe(lambda: _PipeProtocol(reader, loop=loop), pipe)
    return reader


class _PipeProtocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # a pipe has no other direction to keep open
