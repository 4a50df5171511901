"""Children and local servers of one launch: started, watched, restarted, and ended together."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from pydantic import SecretStr

from tandem.config.model import EffectiveConfig
from tandem.config.sources import Setting
from tandem.frontend.config import new_page_key
from tandem.launch.run.options import LaunchOptions
from tandem.launch.supervise.managed_process import Backoff, ManagedProcess
from tandem.launch.supervise.run_dir import make_run_dir
from tandem.runtime.address import host_port
from tandem.runtime.errors import ProtocolError, ServiceError
from tandem.runtime.local.child_process import describe_exit, log_tail
from tandem.runtime.local.local_clusters import LocalCluster, announced, started_s, token_path
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats, LocalServer
from tandem.runtime.local.ports import free_port, http_status, local_address, require_free_port
from tandem.runtime.local.private_file import write_private
from tandem.runtime.printable import masked
from tandem.runtime.process.lifecycle import handled
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.process.work import in_words
from tandem.runtime.store.discovery import decode_instance
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.cluster_messages import Instance

KILL_AFTER_DRAIN_S = 5.0
HEALTH_RETRY_S = 0.05
FOLLOW_INTERVAL_S = 0.2
OPTIONAL_KINDS = ("planner",)  # of children without which the others serve on


class Supervisor(ABC):
    """Runs children until a signal ends them: startup, serve, drain, stop.

    NATS and etcd are started here where the config has no address of them.
    """

    def __init__(self, config: EffectiveConfig, options: LaunchOptions, reporter: Reporter) -> None:
        self._config = config
        self._options = options
        self._report = reporter
        self._run_dir = make_run_dir(options.run_dir)
        self._servers: list[LocalServer] = []
        self._children: list[ManagedProcess] = []
        self._keepers: asyncio.TaskGroup | None = None  # while it serves
        self._keeping: dict[ManagedProcess, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._discovery: EtcdDiscovery | None = None

    @abstractmethod
    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        """Start the children and return when they are ready."""

    @abstractmethod
    def _drain_order(self) -> Sequence[str]:
        """Return the kinds of children, callers first: a callee answers until its callers end."""

    @abstractmethod
    def _report_ready(self) -> None:
        """Print how to use the cluster."""

    def _http_url(self) -> str:
        """Return the address of the frontend; empty where there is none."""
        frontend = self._config.config.frontend
        return f"{frontend.scheme}://{host_port(local_address(frontend.host), frontend.port)}"

    def _is_announced(self) -> bool:
        """Return True when other commands on this machine should find this cluster."""
        return True

    def _own_servers(self) -> dict[str, LocalServer]:
        """Return the server to start for each key of an address that the config does not have."""
        return {
            "runtime.nats_url": LocalNats(self._run_dir),
            "runtime.etcd_endpoints": LocalEtcd(self._run_dir),
        }

    async def run(self) -> int:
        """Return the exit code. Raise TandemError when a child cannot be started or kept up."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(handled(self._on_signal, self._stop.is_set))
            stack.push_async_callback(self._shutdown)
            if await self._unless_stopped(self._startup()):
                if self._is_announced():
                    stack.enter_context(announced(self._cluster(), self._report.warn))
                self._report_ready()
                await self._unless_stopped(self._keep_all())
        return 130 if self._num_signals > 1 else 0

    def _on_signal(self, _: signal.Signals) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            self._report.warn("killing all processes")
            for child in self._children:
                child.kill()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Return True when `work` finished, False when a signal came first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        await cancel(stopped)
        await cancel(task)
        if task.cancelled():
            return False
        task.result()
        return True

    # ---- startup ------------------------------------------------------------------------------

    async def _startup(self) -> None:
        self._make_token()
        self._make_page_key()
        for key, server in self._own_servers().items():
            if self._config.origin(key) == "default":
                await self._start_server(server, key)
        self._discovery = EtcdDiscovery(self._config.config.runtime)
        await self._discovery.start()
        await self._start_children(self._discovery)

    async def _start_server(self, server: LocalServer, key: str) -> None:
        self._report.working(f"starting {server.name}")
        self._servers.append(server)
        await server.start()
        self._config = self._config.with_settings([Setting(key, server.url, "launcher")])
        self._report.done(f"{server.name} at {masked(server.url)}")

    def _make_token(self) -> None:
        """Give a cluster with an etcd of its own a token; other commands find it in a file."""
        token = self._config.config.runtime.cluster_token
        if token is None and self._config.origin("runtime.etcd_endpoints") == "default":
            token = SecretStr(secrets.token_hex(32))
            setting = Setting("runtime.cluster_token", token, "launcher")
            self._config = self._config.with_settings([setting])
        token_path(self._run_dir).unlink(missing_ok=True)  # of an earlier launch
        if token is not None:
            write_private(token_path(self._run_dir), token.get_secret_value())

    def _make_page_key(self) -> None:
        """Give all frontends one key for their page, which stays the same when they restart."""
        if self._config.config.frontend.needs_page_key:
            setting = Setting("frontend.page_key", new_page_key(), "launcher")
            self._config = self._config.with_settings([setting])

    async def _start_child(self, child: ManagedProcess) -> None:
        self._children.append(child)
        await child.start()

    async def _unless_one_dies(self, ready: Coroutine[Any, Any, None]) -> None:
        """Wait for `ready`. Raise ServiceError when a child dies first, or time is up."""
        waiting = asyncio.create_task(ready)
        exits: dict[asyncio.Task[Any], ManagedProcess] = {
            asyncio.create_task(child.child.wait()): child for child in self._children
        }
        try:
            done, _ = await asyncio.wait(
                (waiting, *exits),
                timeout=self._options.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                if child := exits.get(task):
                    raise _died(child, "while starting")
            if not done:
                raise ServiceError(self._not_ready())
            waiting.result()
        finally:
            for task in (waiting, *exits):
                task.cancel()

    async def _until_answers(self, path: str) -> None:
        """Wait until the frontend of this config answers a GET of `path` with 200."""
        frontend = self._config.config.frontend
        while True:
            with contextlib.suppress(ServiceError):
                host = local_address(frontend.host)
                status = await http_status(host, frontend.port, path, scheme=frontend.scheme)
                if status == 200:
                    return
            await asyncio.sleep(HEALTH_RETRY_S)

    def _report_child_ready(self, child: ManagedProcess) -> None:
        """Print a line for every process that became ready, once."""
        if child.announced_pid != child.pid:
            child.announced_pid = child.pid
            self._report.done(f"{child.name} is ready ({child.placement}, pid {child.pid})")

    def _not_ready(self) -> str:
        tails = "\n".join(
            f"{child.name}: {log_tail(child.log_path, 3)}" for child in self._children
        )
        return f"not ready after {self._options.start_timeout_s:.0f} s; the logs end:\n{tails}"

    # ---- serve --------------------------------------------------------------------------------

    async def _keep_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._keepers:
                for server in self._servers:
                    self._keepers.create_task(self._keep(server))
                for child in self._children:
                    self._keep_up(child)
        except* ServiceError as failures:
            raise failures.exceptions[0] from None

    def _keep_up(self, child: ManagedProcess) -> None:
        """Restart a child from now on whenever it ends."""
        assert self._keepers is not None, "it serves"
        self._keeping[child] = self._keepers.create_task(self._keep(child))
        if self._options.is_verbose:
            self._keepers.create_task(self._follow(child))

    async def _let_go(self, child: ManagedProcess) -> None:
        """Let a child drain, and forget it when it has ended."""
        await cancel(self._keeping.pop(child, None))
        await child.stop(self._drain_limit_s, self._report.warn)
        self._children.remove(child)

    async def _keep(self, process: ManagedProcess | LocalServer) -> None:
        """Restart a process whenever it ends.

        Raise ServiceError when one that is needed ends too often.
        """
        backoff = Backoff()
        while True:
            child = process.child
            how = describe_exit(await child.wait())
            if process.child is not child:  # a successor has its place
                continue
            delay_s = backoff.next_delay_s(child.lived_s)
            if delay_s is None:
                death = _died(process, f"for the {backoff.num_restarts + 1}th time in a row")
                if isinstance(process, ManagedProcess) and process.kind in OPTIONAL_KINDS:
                    self._report.warn(f"{death}\nthe others serve on without it")
                    return
                raise death
            self._report.warn(f"{process.name} {how}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            if process.child is not child:
                continue
            await process.start()
            if isinstance(process, LocalServer):
                self._report.done(f"{process.name} is back at {masked(process.url)}")

    async def _follow(self, child: ManagedProcess) -> None:
        with child.log_path.open("r", errors="replace") as log:
            while child in self._children:
                for line in log:
                    self._report.note(f"{child.name}: {line.rstrip()}")
                await asyncio.sleep(FOLLOW_INTERVAL_S)

    def _cluster(self) -> LocalCluster:
        runtime = self._config.config.runtime
        return LocalCluster(
            pid=os.getpid(),
            started_s=started_s(os.getpid()),
            namespace=runtime.namespace,
            nats_url=runtime.nats_url,
            etcd_endpoints=runtime.etcd_endpoints,
            http_url=self._http_url(),
            run_dir=str(self._run_dir),
        )

    # ---- drain and stop -----------------------------------------------------------------------

    @property
    def _drain_limit_s(self) -> float:
        return self._config.config.runtime.drain_timeout_s + KILL_AFTER_DRAIN_S

    async def _shutdown(self) -> None:
        timeout_s = self._drain_limit_s
        if self._num_signals == 1:
            most = f"{in_words(timeout_s)} per role at most"
            self._report.working(f"draining, {most}; Ctrl-C again kills all processes")
        for kind in self._drain_order():
            together = [child for child in self._children if child.kind == kind]
            await asyncio.gather(*(child.stop(timeout_s, self._report.warn) for child in together))
        if self._discovery is not None:
            with contextlib.suppress(ServiceError):
                await self._discovery.close()
        for server in reversed(self._servers):
            await server.stop()
        if self._num_signals:
            self._report.done("stopped; nothing is left running")


def with_free_port(config: EffectiveConfig) -> EffectiveConfig:
    """Return the config with a free port in place of port 0. Raise ConfigError for a taken one."""
    frontend = config.config.frontend
    require_free_port(frontend.host, frontend.port, "--port")
    if frontend.port != 0:
        return config
    chosen = Setting("frontend.port", free_port(frontend.host), "launcher")
    return config.with_settings([chosen])


def local_instance(record: bytes) -> Instance | None:
    """Return an instance's record; None for an instance of another machine."""
    try:
        instance = decode_instance(record)
    except ProtocolError:
        return None
    return instance if instance.host == socket.gethostname() else None


def local_pid(record: bytes) -> int | None:
    """Return the process id in an instance's record; None for an instance of another machine."""
    instance = local_instance(record)
    return instance.pid if instance is not None else None


def _died(process: ManagedProcess | LocalServer, when: str) -> ServiceError:
    code = process.child.exit_code
    how = describe_exit(code) if code is not None else "ended"
    path = process.log_path
    return ServiceError(f"{process.name} {how} {when}; its log, {path}, ends:\n{log_tail(path)}")
