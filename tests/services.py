"""Real NATS and etcd servers for tests: free ports, temporary stores, killed at will."""

import asyncio
import contextlib
import inspect
import json
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tandem.runtime.local.local_servers import etcd_binary, nats_binary

PATIENCE_S = 60.0  # for what comes at once on an idle machine: no test fails because of a busy one
_PORTS = range(16_000, 32_000)  # below those that Linux gives to connections


def free_port() -> int:
    """A TCP port for a server that starts later, or comes back: Linux gives it to no connection."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def stands_still(pid: int) -> bool:
    """Return True once no thread runs; a process counts as stopped before all of them are."""
    return {
        stat.read_text().rpartition(")")[2].split()[0]
        for stat in Path("/proc", str(pid), "task").glob("*/stat")
    } == {"T"}


class Server:
    """A server process with a store; `with` starts and kills it."""

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-test-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What a client is given."""
        raise NotImplementedError

    def command(self, store: Path) -> list[str]:
        """How to run it with its store in a folder."""
        raise NotImplementedError

    def start(self) -> None:
        """Start on the same port as before and wait until it accepts connections."""
        store = Path(self._folder.name) / "store"
        self._process = subprocess.Popen(
            self.command(store), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.perf_counter() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() > deadline_s:
                raise RuntimeError(f"{type(self).__name__} did not start")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL; the store stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, empty: bool = False) -> None:
        """Kill, if it runs, and start on the same port, with the old store or an empty one."""
        self.kill()
        if empty:
            shutil.rmtree(Path(self._folder.name) / "store", ignore_errors=True)
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and answers nothing, from when this returns."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        deadline_s = time.perf_counter() + PATIENCE_S
        while not stands_still(self._process.pid):  # other threads run on for a moment
            assert time.perf_counter() < deadline_s, "it does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()


class NatsServer(Server):
    """nats-server with JetStream."""

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self, store: Path) -> list[str]:
        return [
            str(nats_binary()), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(store),
        ]  # fmt: skip


class MonitoredNatsServer(NatsServer):
    """nats-server that tells how many subscriptions it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._monitor_port = free_port()

    def command(self, store: Path) -> list[str]:
        return [*super().command(store), "-m", str(self._monitor_port)]

    def monitor(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor_port}{path}") as response:
            return json.load(response)

    def num_subscriptions(self, subject: str) -> int:
        """Of clients, on exactly this subject."""
        connections = self.monitor("/connz?subs=1")["connections"]
        return sum(each.get("subscriptions_list", []).count(subject) for each in connections)


class EtcdServer(Server):
    """A single etcd."""

    def __init__(self) -> None:
        super().__init__()
        self._peer_port = free_port()
        self.context: ssl.SSLContext | None = None  # of its health check

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self, store: Path) -> list[str]:
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            *(str(etcd_binary()), "--data-dir", str(store)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            "--unsafe-no-fsync",
        ]

    def _over_tls(self, connection: socket.socket) -> socket.socket:
        if self.context is None:
            return connection
        return self.context.wrap_socket(connection, server_hostname="127.0.0.1")

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1.0) as plain,
            self._over_tls(plain) as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b'"health":"true"' in _read_all(connection)
        return False


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(4096):
        data += chunk
    return data


async def eventually(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, pause_s: float = 0.01
) -> None:
    """Wait until `condition()`, or what comes of awaiting it, is true; then AssertionError."""
    deadline_s = time.perf_counter() + timeout_s
    while not (await holds if inspect.isawaitable(holds := condition()) else holds):
        assert time.perf_counter() < deadline_s, f"still false after {timeout_s} s"
        await asyncio.sleep(pause_s)
