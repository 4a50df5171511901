"""Children and services of a launcher: started, watched, started again, and ended together."""

import asyncio
import contextlib
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.config.sources import Setting
from tandem.launch.supervise.local_services import EmbeddedEtcd, EmbeddedNats, EmbeddedService
from tandem.launch.supervise.managed_process import Backoff, ManagedProcess, describe_exit
from tandem.launch.supervise.processes import http_get
from tandem.launch.supervise.reporter import Reporter
from tandem.runtime.errors import ServiceError
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.local_clusters import LocalCluster, announced
from tandem.runtime.messages import Instance

KILL_AFTER_DRAIN_S = 5.0
HEALTH_RETRY_S = 0.05
FOLLOW_INTERVAL_S = 0.2


class Keeper(ABC):
    """Runs children until a signal ends them: startup, serve, drain, stop.

    `embed_*`: start that service here instead of joining one.
    """

    def __init__(
        self,
        config: EffectiveConfig,
        reporter: Reporter,
        run_dir: Path,
        *,
        embed_nats: bool,
        embed_etcd: bool,
        is_verbose: bool,
        start_timeout_s: float,
    ) -> None:
        self._config = config
        self._say = reporter
        self._run_dir = run_dir
        self._embed_nats = embed_nats
        self._embed_etcd = embed_etcd
        self._is_verbose = is_verbose
        self._start_timeout_s = start_timeout_s
        self._services: list[EmbeddedService] = []
        self._children: list[ManagedProcess] = []
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._discovery: EtcdDiscovery | None = None

    @abstractmethod
    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        """Starts them, and returns when they are ready."""

    @abstractmethod
    def _drain_order(self) -> Sequence[Sequence[ManagedProcess]]:
        """Who is ended together with whom, callers first: what they call still answers."""

    @abstractmethod
    def _http_url(self) -> str:
        """Where users of the cluster turn to; empty where there is no such address."""

    @abstractmethod
    def _is_announced(self) -> bool:
        """Whether other commands of this machine are to find this cluster."""

    @abstractmethod
    def _report_ready(self) -> None: ...

    async def run(self) -> int:
        """The exit code. Raises TandemError when a child cannot be started or kept up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._shutdown)
            if await self._unless_stopped(self._startup()):
                if self._is_announced():
                    stack.enter_context(announced(self._cluster()))
                self._report_ready()
                await self._unless_stopped(self._keep_all())
        return 130 if self._num_signals > 1 else 0

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            self._say.warn("killing everything")
            for child in self._children:
                child.kill()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """True when `work` came to its end, False when a signal came first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        for pending in (task, stopped):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending
        if task.cancelled():
            return False
        task.result()
        return True

    # ---- startup ------------------------------------------------------------------------------

    async def _startup(self) -> None:
        if self._embed_nats:
            await self._start_service(EmbeddedNats(self._run_dir), "runtime.nats_url")
        if self._embed_etcd:
            await self._start_service(EmbeddedEtcd(self._run_dir), "runtime.etcd_endpoints")
        self._discovery = EtcdDiscovery(self._config.config.runtime)
        await self._discovery.start()
        await self._start_children(self._discovery)

    async def _start_service(self, service: EmbeddedService, key: str) -> None:
        self._say.working(f"starting {service.name}")
        self._services.append(service)
        await service.start()
        self._config = self._config.with_settings([Setting(key, service.url, "launcher")])
        self._say.done(f"{service.name} at {service.url}")

    async def _start_child(self, child: ManagedProcess) -> None:
        self._children.append(child)
        await child.start()

    async def _unless_one_dies(self, ready: Coroutine[Any, Any, None]) -> None:
        """Waits for `ready`. Raises ServiceError when a child dies first, or time is up."""
        waiting = asyncio.create_task(ready)
        exits: dict[asyncio.Task[Any], ManagedProcess] = {
            asyncio.create_task(child.wait()): child for child in self._children
        }
        try:
            done, _ = await asyncio.wait(
                (waiting, *exits),
                timeout=self._start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                if child := exits.get(task):
                    raise self._died(child, "while starting")
            if not done:
                raise ServiceError(self._not_ready())
            waiting.result()
        finally:
            for task in (waiting, *exits):
                task.cancel()

    async def _until_answers(self, path: str) -> None:
        """Waits until the frontend of this config answers a GET of `path` with 200."""
        frontend = self._config.config.frontend
        while True:
            with contextlib.suppress(ServiceError):
                status, _ = await http_get(dialled(frontend.host), frontend.port, path)
                if status == 200:
                    return
            await asyncio.sleep(HEALTH_RETRY_S)

    def _not_ready(self) -> str:
        tails = "\n".join(f"{child.name}: {child.tail(3)}" for child in self._children)
        return f"not ready after {self._start_timeout_s:.0f} s; the logs end:\n{tails}"

    def _died(self, child: ManagedProcess, when: str) -> ServiceError:
        code = child.child.exit_code if child.child else None
        how = describe_exit(code) if code is not None else "is gone"
        return ServiceError(
            f"{child.name} {how} {when}; its log, {child.log_path}, ends:\n{child.tail()}"
        )

    # ---- serve --------------------------------------------------------------------------------

    async def _keep_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._keep_child(child))
                    if self._is_verbose:
                        group.create_task(self._follow(child))
                for service in self._services:
                    group.create_task(self._keep_service(service))
        except* ServiceError as failures:
            raise failures.exceptions[0] from None

    async def _keep_child(self, child: ManagedProcess) -> None:
        while True:
            how = describe_exit(await child.wait())
            delay_s = child.backoff.next_delay_s(child.lived_s)
            if delay_s is None:
                raise self._died(child, f"for the {child.backoff.num_restarts + 1}th time in a row")
            self._say.warn(f"{child.name} {how}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await child.start()

    async def _keep_service(self, service: EmbeddedService) -> None:
        backoff = Backoff()
        while True:
            how = describe_exit(await service.child.wait())
            delay_s = backoff.next_delay_s(0.0)
            if delay_s is None:
                raise ServiceError(f"{service.name} {how} again and again; see {service.log_path}")
            self._say.warn(f"{service.name} {how}; starting it again in {delay_s:g} s")
            await service.restart(down_s=delay_s)
            self._say.done(f"{service.name} is back at {service.url}")

    async def _follow(self, child: ManagedProcess) -> None:
        with child.log_path.open("r", errors="replace") as log:
            while True:
                for line in log:
                    self._say.note(f"{child.name}: {line.rstrip()}")
                await asyncio.sleep(FOLLOW_INTERVAL_S)

    def _cluster(self) -> LocalCluster:
        runtime = self._config.config.runtime
        return LocalCluster(
            pid=os.getpid(),
            started_s=psutil.Process().create_time(),
            namespace=runtime.namespace,
            nats_url=runtime.nats_url,
            etcd_endpoints=runtime.etcd_endpoints,
            http_url=self._http_url(),
            run_dir=str(self._run_dir),
        )

    # ---- drain and stop -----------------------------------------------------------------------

    async def _shutdown(self) -> None:
        if self._num_signals == 1:
            self._say.working("draining; Ctrl-C again kills")
        timeout_s = self._config.config.runtime.drain_timeout_s + KILL_AFTER_DRAIN_S
        for together in self._drain_order():
            await asyncio.gather(*(child.stop(timeout_s, self._say.warn) for child in together))
        if self._discovery is not None:
            with contextlib.suppress(ServiceError):
                await self._discovery.close()
        for service in reversed(self._services):
            await service.stop()
        if self._num_signals:
            self._say.done("stopped; nothing is left running")


def local_pid(instance: bytes) -> int | None:
    """The process of a registered instance, when it is one of this machine."""
    try:
        decoded = msgspec.json.decode(instance, type=Instance)
    except msgspec.DecodeError:
        return None
    return decoded.pid if decoded.host == socket.gethostname() else None


def dialled(host: str) -> str:
    """The address that reaches a server bound to `host` from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
