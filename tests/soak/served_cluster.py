"""Two `tandem serve` in one cluster, each with a model of its own, and what its processes hold."""

import asyncio
import hashlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from unittest.mock import patch

import aiohttp
import psutil
from pydantic import SecretStr

from tandem.bench.stack.served_stack import ServedStack, served
from tandem.config.model import load_config
from tandem.config.sources import Setting
from tandem.launch.cluster.status import ClusterReport, read_cluster
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.errors import TandemError
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.e2e.cluster import write_sensitive_model

HONEST, LIMITED = "the key of an honest caller", "the key of a limited caller"
LIMIT_PER_MINUTE = 60
# of one process: `tandem serve` gives up one that lives shorter, time and again
STRIKE_AGAIN_S = 62.0
BOTH_SHARE = 0.25  # of the strikes: two processes at once
STRIKES = ("kill", "kill", "kill", "end", "stop")
STOP_S = (1.0, 4.0)
# a worker's start takes longer than the default on a loaded machine
PATIENCE = ("--frontend.migration_wait_s=100", "--frontend.return_wait_s=100")
SETTLE_TIMEOUT_S = 120.0
NUM_MEMBERS = 5  # two frontends, three workers
OTHERS = ("nats", "etcd", "forks")  # than members


@dataclass(slots=True)
class Strike:
    """What was done to which processes. Times are time.monotonic()."""

    kind: str
    victims: tuple[str, ...]
    began_at: float
    ended_at: float = float("inf")  # all processes were there again

    def touches(self, begin: float, end: float, lag_s: float = 0.0) -> bool:
        """Return True if it lasted at some time within these."""
        return self.began_at <= end and begin <= self.ended_at + lag_s

    def __str__(self) -> str:
        return f"{self.kind} {' and '.join(self.victims)}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an idle cluster holds."""

    processes: dict[str, dict[str, int]]  # name |-> counts; `rss` in bytes
    keys: Counter[str]  # of etcd, by their first parts
    consumers: dict[str, int]  # of NATS, by stream


class Served:
    """The cluster: two launchers, their processes, and what these hold."""

    def __init__(self, run_dir: Path) -> None:
        self.folders = (run_dir / "first", run_dir / "second")
        self._run_dir = run_dir
        self._stack = AsyncExitStack()
        self.stacks: list[ServedStack] = []
        self.strikes: list[Strike] = []
        self._struck_at: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        model = write_sensitive_model(self._run_dir / "sensitive")
        keys = [
            f"{name} {hashlib.sha256(key.encode()).hexdigest()} {options}"
            for name, key, options in (
                ("honest", HONEST, "operator metrics"),
                ("limited", LIMITED, f"requests_per_minute={LIMIT_PER_MINUTE}"),
            )
        ]
        flags = [*PATIENCE, "--runtime.metrics_port=0", f"--frontend.api_keys={';'.join(keys)}"]
        self.stacks.append(await self._serve(BUNDLED_MODEL, flags, self.folders[0]))
        cluster = self.stacks[0].cluster
        self.url = cluster.http_url
        values = cluster.runtime_values()
        token = values.pop("cluster_token")
        settings = [Setting(f"runtime.{name}", value, "soak") for name, value in values.items()]
        settings.append(Setting("runtime.cluster_token", SecretStr(token), "soak"))
        self.effective = load_config().with_settings(settings)
        flags += [f"--nats-url={values['nats_url']}", "--workers=1"]
        flags += [f"--etcd-endpoints={values['etcd_endpoints']}"]
        flags += [f"--namespace={values['namespace']}"]
        with patch.dict(os.environ, {"TANDEM_RUNTIME__CLUSTER_TOKEN": token}):
            self.stacks.append(await self._serve(model, flags, self.folders[1]))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _serve(self, model: Path, flags: Sequence[str], folder: Path) -> ServedStack:
        return await self._stack.enter_async_context(served(model, None, flags, folder))

    def processes(self) -> dict[str, psutil.Process]:
        """Return the children of the launchers, each by the name of its log."""
        found: dict[str, psutil.Process] = {}
        for stack, folder in zip(self.stacks, self.folders, strict=True):
            for child in psutil.Process(stack.cluster.pid).children():
                with suppress(OSError):
                    log = Path(os.readlink(f"/proc/{child.pid}/fd/2"))
                    found[f"{folder.name}/{log.stem}"] = child
        return found

    async def until(self, flaw: Callable[[ClusterReport, set[int]], str]) -> ClusterReport:
        """Wait until a report of the cluster, and the pids of its members, have no flaw."""
        why = ""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while True:
                    try:
                        report = await read_cluster(self.effective)
                        names = self.processes().items()
                        pids = {each.pid for name, each in names if not name.endswith(OTHERS)}
                        if not (why := flaw(report, pids)):
                            return report
                    except TandemError as error:
                        why = str(error)
                    await asyncio.sleep(0.3)
        except TimeoutError:
            raise AssertionError(f"the cluster does not settle: {why}") from None

    async def snapshot(self, http: aiohttp.ClientSession) -> Snapshot:
        """Return what the cluster holds once it is at rest."""
        report = await self.until(at_rest)
        addresses = {
            each.instance.pid: (each.instance.metrics or each.instance.address)
            for each in report.instances
        }
        found: dict[str, dict[str, int]] = {}
        for name, process in self.processes().items():
            counts = {"rss": process.memory_info().rss, "descriptors": process.num_fds()}
            counts |= {"threads": process.num_threads(), "pid": process.pid}
            if address := addresses.get(process.pid):
                counts["tasks"] = await _num_tasks(http, address)
            found[name] = counts
        config = self.effective.config.runtime
        async with started(EtcdDiscovery(config)) as discovery:
            keys = await discovery.get_prefix("/")
        async with started(NatsConnection(config)) as nats:
            streams = await nats.client.jetstream().streams_info()
        return Snapshot(
            found,
            Counter("/".join(key.split("/")[:4]) for key in keys),
            {each.config.name: each.state.consumer_count for each in streams},
        )

    async def strike(self, draw: random.Random) -> None:
        """Strike one process, or two at once, and wait until the cluster answers again."""
        now = time.monotonic()
        processes = self.processes()
        names = [
            name
            for name in sorted(processes)
            if now - self._struck_at.get(name, -STRIKE_AGAIN_S) >= STRIKE_AGAIN_S
        ]
        count = 2 if draw.random() < BOTH_SHARE else 1
        victims = tuple(draw.sample(names, min(count, len(names))))
        if not victims:
            return
        strike = Strike(draw.choice(STRIKES), victims, time.monotonic())
        self.strikes.append(strike)
        number = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "stop": signal.SIGSTOP}
        for name in victims:
            self._struck_at[name] = now
            processes[name].send_signal(number[strike.kind])
        if strike.kind == "stop":
            await asyncio.sleep(draw.uniform(*STOP_S))
            for name in victims:
                processes[name].send_signal(signal.SIGCONT)
        await self.until(absent)
        strike.ended_at = time.monotonic()


def absent(report: ClusterReport, pids: set[int]) -> str:
    """Return which members are not there or do not answer; empty when all do."""
    known = {each.instance.pid for each in report.instances}
    silent = [each.state for each in report.instances if each.state not in ("ready", "serving")]
    if known == pids and len(pids) == NUM_MEMBERS and not silent:
        return ""
    return f"processes {sorted(pids)}, registered {sorted(known)}, not ready {silent}"


def at_rest(report: ClusterReport, pids: set[int]) -> str:
    """Return who is absent, or what an idle cluster should not hold; empty for nothing."""
    if flaw := absent(report, pids):
        return flaw
    for each in report.instances:
        if each.worker is not None:
            load, status = each.worker.load, each.worker
            num_held = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
            busy = (load.num_running, load.num_waiting)
            busy += (status.count("num_open_handoffs"), status.count("num_jobs"))
            if num_held or any(busy):
                return f"{each.instance.instance_id} holds {num_held} blocks, {busy}"
    for queue in report.queues:
        if queue.error or queue.num_jobs or queue.num_in_progress:
            return f"{queue}"
    return ""


async def _num_tasks(http: aiohttp.ClientSession, address: str) -> int:
    url = address if "://" in address else f"http://{address}"
    async with http.get(f"{url}/metrics", headers={"authorization": f"Bearer {HONEST}"}) as got:
        [count] = re.findall(r"(?m)^tandem_event_loop_tasks (\S+)$", await got.text())
    return int(float(count))
