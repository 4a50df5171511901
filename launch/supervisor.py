"""`tandem serve`: services and roles of one machine as children, started, watched and ended."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tandem.launch.config import EffectiveConfig
from tandem.launch.config_sources import Setting
from tandem.launch.devices import list_gpus, num_usable_cores
from tandem.launch.local_clusters import LocalCluster, announced
from tandem.launch.plan import make_plan
from tandem.launch.processes import http_get
from tandem.launch.reporter import Reporter
from tandem.launch.role_process import Backoff, RoleProcess, describe_exit
from tandem.launch.services import EmbeddedEtcd, EmbeddedNats, EmbeddedService
from tandem.launch.topology import Topology
from tandem.runtime.discovery import WatchView
from tandem.runtime.errors import ServiceError
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.messages import Instance

DRAIN_ORDER = ("frontend", "decode", "prefill")  # callers first: what they call still answers
KILL_AFTER_DRAIN_S = 5.0
HEALTH_RETRY_S = 0.05
FOLLOW_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and how. `embed_*`: start that service here instead of joining one."""

    config: EffectiveConfig
    topology: Topology
    model: str
    model_name: str
    run_dir: Path
    embed_nats: bool = True
    embed_etcd: bool = True
    verbose: bool = False
    start_timeout_s: float = 600.0


class Supervisor:
    """Runs a topology until a signal ends it: startup, serve, drain, stop."""

    def __init__(self, options: ServeOptions, reporter: Reporter) -> None:
        self._options = options
        self._say = reporter
        self._services: list[EmbeddedService] = []
        self._roles: list[RoleProcess] = []
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._discovery: EtcdDiscovery | None = None
        self._config = options.config

    async def run(self) -> int:
        """The exit code. Raises TandemError when the topology cannot be started or kept up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._shutdown)
            if await self._unless_stopped(self._startup()):
                stack.enter_context(announced(self._cluster()))
                self._report_ready()
                await self._unless_stopped(self._keep_all())
        return 130 if self._num_signals > 1 else 0

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            self._say.warn("killing everything")
            for role in self._roles:
                role.kill()

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
        if self._options.embed_nats:
            await self._start_service(EmbeddedNats(self._options.run_dir), "runtime.nats_url")
        if self._options.embed_etcd:
            await self._start_service(EmbeddedEtcd(self._options.run_dir), "runtime.etcd_endpoints")
        self._discovery = EtcdDiscovery(self._config.config.runtime)
        await self._discovery.start()
        plan = make_plan(self._options.topology, self._config, list_gpus(), num_usable_cores())
        for note in plan.notes:
            self._say.note(note)
        for role_plan in plan.roles:
            role = RoleProcess(
                role_plan, self._options.model, self._options.model_name, self._options.run_dir
            )
            self._roles.append(role)
            await role.start()
        await self._wait_ready(self._discovery)

    async def _start_service(self, service: EmbeddedService, key: str) -> None:
        self._say.working(f"starting {service.name}")
        self._services.append(service)
        await service.start()
        self._config = self._config.with_settings([Setting(key, service.url, "launcher")])
        self._say.done(f"{service.name} at {service.url}")

    async def _wait_ready(self, discovery: EtcdDiscovery) -> None:
        names = ", ".join(role.name for role in self._roles)
        self._say.working(f"loading {self._options.model_name}: {names}")
        namespace = self._config.config.runtime.namespace
        view = discovery.watch(f"/tandem/{namespace}/instances/")
        await view.ready()
        view.subscribe(self._instance_changed)
        ready = asyncio.create_task(self._until_ready(view))
        exits: dict[asyncio.Task[Any], RoleProcess] = {
            asyncio.create_task(role.wait()): role for role in self._roles
        }
        try:
            done, _ = await asyncio.wait(
                (ready, *exits),
                timeout=self._options.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                if role := exits.get(task):
                    raise self._died(role, "while starting")
            if not done:
                raise ServiceError(self._not_ready())
            ready.result()
        finally:
            for task in (ready, *exits):
                task.cancel()

    async def _until_ready(self, view: WatchView) -> None:
        workers = [role for role in self._roles if role.plan.role != "frontend"]
        await view.wait_for(
            lambda items: {role.pid for role in workers} <= {_local_pid(v) for v in items.values()},
            self._options.start_timeout_s,
        )
        frontend = self._config.config.frontend
        while True:
            with contextlib.suppress(ServiceError):
                status, _ = await http_get(_dialled(frontend.host), frontend.port, "/health")
                if status == 200:
                    return
            await asyncio.sleep(HEALTH_RETRY_S)

    def _instance_changed(self, key: str, value: bytes | None) -> None:
        pid = _local_pid(value) if value is not None else None
        for role in self._roles:
            if pid is not None and role.pid == pid and role.announced_pid != pid:
                role.announced_pid = pid
                where = role.plan.device.name if role.plan.device else "CPU"
                self._say.done(f"{role.name} is ready ({where}, pid {pid})")

    def _not_ready(self) -> str:
        tails = "\n".join(f"{role.name}: {role.tail(3)}" for role in self._roles)
        return f"not ready after {self._options.start_timeout_s:.0f} s; the logs end:\n{tails}"

    def _died(self, role: RoleProcess, when: str) -> ServiceError:
        code = role.child.exit_code if role.child else None
        how = describe_exit(code) if code is not None else "is gone"
        return ServiceError(
            f"{role.name} {how} {when}; its log, {role.log_path}, ends:\n{role.tail()}"
        )

    # ---- serve --------------------------------------------------------------------------------

    async def _keep_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for role in self._roles:
                    group.create_task(self._keep_role(role))
                    if self._options.verbose:
                        group.create_task(self._follow(role))
                for service in self._services:
                    group.create_task(self._keep_service(service))
        except* ServiceError as failures:
            raise failures.exceptions[0] from None

    async def _keep_role(self, role: RoleProcess) -> None:
        while True:
            how = describe_exit(await role.wait())
            delay_s = role.backoff.next_delay_s(role.lived_s)
            if delay_s is None:
                raise self._died(role, f"for the {role.backoff.num_restarts + 1}th time in a row")
            self._say.warn(f"{role.name} {how}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await role.start()

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

    async def _follow(self, role: RoleProcess) -> None:
        with role.log_path.open("r", errors="replace") as log:
            while True:
                for line in log:
                    self._say.note(f"{role.name}: {line.rstrip()}")
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
            run_dir=str(self._options.run_dir),
        )

    def _http_url(self) -> str:
        frontend = self._config.config.frontend
        return f"http://{_dialled(frontend.host)}:{frontend.port}"

    def _report_ready(self) -> None:
        topology, url = self._options.topology, self._http_url()
        body = msgspec.json.encode(
            {
                "model": self._options.model_name,
                "messages": [{"role": "user", "content": "Tell me a story."}],
                "max_tokens": 64,
            }
        ).decode()
        self._say.done(f"ready: {url} serves {self._options.model_name} ({topology.description})")
        self._say.output(
            f"\ncurl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        )
        self._say.note(f"logs: {self._options.run_dir}")
        if topology.count("prefill"):
            disagg = self._roles[0].plan.config.config.disagg
            self._say.note(
                f"policy {disagg.policy}, prompts up to {disagg.max_local_prefill_length} uncached "
                "tokens stay on their decode worker; change it while serving: "
                "tandem config set disagg.max_local_prefill_length 512"
            )
        self._say.note("Ctrl-C stops; tandem status shows what is going on")

    # ---- drain and stop -----------------------------------------------------------------------

    async def _shutdown(self) -> None:
        if self._num_signals == 1:
            self._say.working("draining; Ctrl-C again kills")
        timeout_s = self._config.config.runtime.drain_timeout_s + KILL_AFTER_DRAIN_S
        for kind in DRAIN_ORDER:
            roles = [role for role in self._roles if role.plan.role == kind]
            await asyncio.gather(*(role.stop(timeout_s, self._say.warn) for role in roles))
        if self._discovery is not None:
            with contextlib.suppress(ServiceError):
                await self._discovery.close()
        for service in reversed(self._services):
            await service.stop()
        if self._num_signals:
            self._say.done("stopped; nothing is left running")


def _local_pid(instance: bytes) -> int | None:
    """The process of a registered instance, when it is one of this machine."""
    try:
        decoded = msgspec.json.decode(instance, type=Instance)
    except msgspec.DecodeError:
        return None
    return decoded.pid if decoded.host == socket.gethostname() else None


def _dialled(host: str) -> str:
    """The address that reaches a server bound to `host` from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
