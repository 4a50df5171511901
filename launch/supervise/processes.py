"""Child processes that cannot outlive this one, and the ports they listen on."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.launch.supervise.spawn import DEVNULL, Process, spawn
from tandem.runtime.errors import ConfigError, ServiceError

DEATHWATCH = Path(__file__).with_name("deathwatch.py")
LOG_TAIL_LINES = 20


class ChildProcess:
    """A child in its own session whose output goes to a file.

    It is killed when this process dies, however that happens. Start it from the main thread: the
    kernel watches the thread that forked. Its own session keeps the terminal's Ctrl-C from it, so
    that the launcher decides who stops when.
    """

    def __init__(self, name: str, process: Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        env: Mapping[str, str] | None = None,
    ) -> "ChildProcess":
        with log_path.open("ab") as log:
            process = await spawn(
                *(sys.executable, "-I", "-S", str(DEATHWATCH), str(os.getpid()), *command),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Sends `number` to the child alone; nothing happens when it is gone."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the child and whatever it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> bool:
        """Asks it to end, and kills it after `timeout_s`. False when it had to be killed."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its log."""
        return log_tail(self.log_path, num_lines)


def log_tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last `num_lines` of a log file; empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16384))
            lines = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-num_lines:])


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_port_free(host: str, port: int) -> bool:
    """True when a server could listen on host:port now. Raises ConfigError for a host not ours."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError as exc:
            raise ConfigError(f"port {port} needs privileges: choose one above 1023") from exc
        except OSError as exc:
            if exc.errno in (98, 48):  # EADDRINUSE on Linux, on BSD
                return False
            raise ConfigError(f"cannot listen on {host}: {exc.strerror or exc}") from exc
    return True


def require_free_port(host: str, port: int, flag: str) -> None:
    """Raises ConfigError naming the next free port when `port` is taken."""
    if port == 0 or is_port_free(host, port):
        return
    candidates = range(port + 1, min(port + 200, 65536))
    nearest = next((p for p in candidates if is_port_free(host, p)), None)
    hint = f"; {nearest} is free: {flag} {nearest}" if nearest else ""
    raise ConfigError(f"port {port} on {host} is taken{hint}", param=flag)


async def http_get(host: str, port: int, path: str, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """Status and body of a plain GET. Raises ServiceError when there is no HTTP answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request.encode("ascii"))
                answer = await reader.read(1 << 20)
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body
    except (OSError, TimeoutError, ValueError, IndexError) as exc:
        raise ServiceError(f"no HTTP answer from {host}:{port}{path}: {exc or 'timeout'}") from exc


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
