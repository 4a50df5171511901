"""Four workers, of fixed roles or of both, some of several ranks; all connections can be cut."""

import asyncio
import contextlib
import json
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.wire.cluster_messages import RoleChange, WorkerRole, WorkerStatus
from tandem.runtime.wire.messages import encode
from tests.e2e.cluster import Cluster, write_sensitive_model
from tests.services import free_port
from tests.soak.points import Trap
from tests.soak.proxy import Proxy

DOOMED = Path(__file__).with_name("doomed_worker.py")
PREFILL = ("prefill0", "prefill1")
DECODE = ("decode0", "decode1")
FLEXIBLE = ("flexible0", "flexible1")  # workers that get any role
STEADY = ("steady0", "steady1")  # workers of both roles that always keep the decode role
CHANGE_TIMEOUT_S = 20.0  # more than a stopped or cut worker needs
JOIN_TIMEOUT_S = 240.0  # of workers of four ranks on few cores
MAX_UNPLANNED_EXITS = 50
STOP_TIMEOUT_S = 20.0
SETTLE_TIMEOUT_S = 40.0
RANK_END_TIMEOUT_S = 20.0  # of a worker that lost a rank, and of a rank that lost its worker
FLAGS = (
    "--engine.max_num_batched_tokens=512",
    "--engine.num_blocks=1000",
    # what users have; a partition shorter than that is no death
    "--runtime.lease_ttl_s=10",
    # the flipped bits are ours: nobody is to be excluded for them
    "--transfer.exclude_after=1000000",
)


@dataclass(frozen=True, slots=True)
class Terms:
    """How the workers are started: the bits flipped in them, and further flags."""

    seed: int
    flip_probability: float
    is_blind: bool = False
    flags: tuple[str, ...] = ()
    both: bool = False
    tp: int = 1  # the ranks of a loose and of a steady worker


@dataclass(frozen=True, slots=True)
class Crew:
    """The names of the workers. Of `loose` ones all may be struck at once, of `steady` ones one.

    So there is a decode worker at any time, and an answer has no excuse.
    """

    loose: tuple[str, ...]
    steady: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    wide: tuple[str, ...] = ()  # those of `tp` ranks, the others have one
    tp: int = 1

    def role_of(self, name: str) -> str:
        """Return the command that the worker is started by."""
        has_both = name in self.prefill and name in self.decode
        return "worker" if has_both else name.rstrip("0123456789")


FIXED_CREW = Crew(PREFILL, DECODE, PREFILL, DECODE)
BOTH_CREW = Crew(FLEXIBLE, STEADY, FLEXIBLE + STEADY, FLEXIBLE + STEADY)


@dataclass(slots=True)
class Slot:
    """A worker's place, in which processes come and go, each under an address of its own."""

    name: str
    role: str
    nats: Proxy
    etcd: Proxy
    front: Proxy | None = None  # what it advertises
    links: dict[str, Proxy] = field(default_factory=dict)  # of the prefill role, by decode slot
    num_starts: int = 0
    trap: Trap | None = None  # of the process that runs now
    instance_ids: dict[int, str] = field(default_factory=dict)  # pid |-> instance
    ranks: list[psutil.Process] = field(default_factory=list)  # 1 and up, of the one that runs

    def proxies(self, which: str) -> list[Proxy]:
        if which == "links":
            return list(self.links.values())
        ways = {"front": self.front, "nats": self.nats, "etcd": self.etcd}
        return [proxy for proxy in (ways[which],) if proxy is not None]


class Fleet:
    """The cluster of a soak. Faults are its methods; all of them are bounded."""

    def __init__(self, run_dir: Path, terms: Terms) -> None:
        self.cluster = Cluster(run_dir, write_sensitive_model(run_dir / "sensitive"))
        self.slots: dict[str, Slot] = {}
        self.frontend_ways: dict[str, Proxy] = {}
        self.num_unplanned_exits = 0
        self._run_dir = run_dir
        self._terms = terms
        crew = BOTH_CREW if terms.both else FIXED_CREW
        wide = (crew.loose[-1], crew.steady[-1]) if terms.tp > 1 else ()
        self.crew = replace(crew, wide=wide, tp=terms.tp)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self.cluster)
            for name in dict.fromkeys((*self.crew.decode, *self.crew.prefill)):
                await self._add_slot(name)
            await self._start_frontend()
            for name in self.slots:
                await self.start(name)
            await self.joined(*self.slots)
            await self.cluster.ready(len(self.crew.prefill), len(self.crew.decode))
            await self.cluster.set_config("disagg.max_local_prefill_length", 200)
            await self.cluster.set_config("disagg.policy", "threshold")
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start_frontend(self) -> None:
        cluster, ways = self.cluster, self.frontend_ways
        ways["nats"] = await self._proxy(cluster.nats.port)
        ways["etcd"] = await self._proxy(cluster.etcd.socket)
        await cluster.start("frontend", "frontend", *self._services(ways["nats"], ways["etcd"]))

    def ways_to(self, service: str) -> list[Proxy]:
        """Everybody's connections to NATS or etcd."""
        ways = [proxy for slot in self.slots.values() for proxy in slot.proxies(service)]
        return [*ways, self.frontend_ways[service]]

    async def _add_slot(self, name: str) -> None:
        self.slots[name] = Slot(
            name,
            self.crew.role_of(name),
            nats=await self._proxy(self.cluster.nats.port),
            etcd=await self._proxy(self.cluster.etcd.socket),
        )

    def _services(self, nats: Proxy, etcd: Proxy) -> tuple[str, ...]:
        user, _, _ = self.cluster.nats.url.rpartition("@")
        return (
            *("--nats-url", f"{user}@{nats.address}"),
            *("--etcd-endpoints", f"http://{etcd.address}"),
        )

    async def _proxy(self, target: int | Path) -> Proxy:
        proxy = await Proxy(target).start()
        self._stack.push_async_callback(proxy.close)
        return proxy

    async def _new_address(self, slot: Slot) -> int:
        """A port for a new process of this slot, with all ways to it; the old ways are closed."""
        port = free_port()
        if slot.front is not None:
            await slot.front.close()
        slot.front = await self._proxy(port)
        if slot.name in self.crew.decode:
            for name in self.crew.prefill:
                if name == slot.name:
                    continue
                links = self.slots[name].links
                if slot.name in links:
                    await links[slot.name].close()
                links[slot.name] = await self._proxy(port)
                self._write_links(name)
        return port

    def _links_path(self, name: str) -> Path:
        return self._run_dir / f"{name}.links.json"

    def _write_links(self, name: str) -> None:
        links = {}
        for decode, link in self.slots[name].links.items():
            front = self.slots[decode].front
            if front is not None:
                links[front.address] = link.address
        partial = self._run_dir / f"{name}.links.partial"
        partial.write_text(json.dumps(links))
        partial.rename(self._links_path(name))

    # ---- processes ----------------------------------------------------------------------------

    def child(self, name: str) -> ChildProcess:
        return self.cluster.children[name]

    async def start(self, name: str) -> None:
        """A new process in this slot; `joined` waits for it."""
        slot = self.slots[name]
        slot.num_starts += 1
        folder = self._run_dir / f"{name}.{slot.num_starts}"
        slot.trap = Trap(folder)
        port = await self._new_address(slot)
        assert slot.front is not None
        hooks = {
            "folder": str(folder),
            "port": port,
            "advertised": slot.front.address,
            "links": str(self._links_path(name)) if name in self.crew.prefill else "",
            "flip_probability": self._terms.flip_probability,
            "is_blind": self._terms.is_blind,
            "seed": self._terms.seed * 1000 + slot.num_starts,
        }
        services = self._services(slot.nats, slot.etcd)
        entry = (str(DOOMED), json.dumps(hooks))
        flags = (*FLAGS, f"--tp={self.crew.tp}") if name in self.crew.wide else FLAGS
        await self.cluster.start(
            name, slot.role, *services, *flags, *self._terms.flags, entry=entry
        )

    async def kill(self, *names: str) -> None:
        """SIGKILL; returns when they are gone, and their ranks, which nobody kills."""
        for name in names:
            self.child(name).signal(signal.SIGKILL)
        for name in names:
            await self.ended(name)

    async def ended(self, name: str) -> None:
        """Until the worker has ended, by itself or not, and its ranks by themselves."""
        async with asyncio.timeout(RANK_END_TIMEOUT_S):
            await self.child(name).wait()
            while any(_runs(rank) for rank in self.slots[name].ranks):
                await asyncio.sleep(0.01)

    async def terminate(self, name: str) -> None:
        """SIGTERM; returns when it is gone."""
        await self.child(name).stop(STOP_TIMEOUT_S)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.cluster.signal_child(self.child(name), number)

    def signal_rank(self, name: str, rank: int, number: int) -> None:
        """To a rank above 0; no effect when it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.slots[name].ranks[rank - 1].send_signal(number)

    async def change_role(self, name: str, role: WorkerRole) -> None:
        """Return when the worker has the role. Raises its own errors, and those of the way."""
        front = self.slots[name].front
        assert front is not None
        async with RequestContext(timeout_s=CHANGE_TIMEOUT_S) as context:
            change = encode(RoleChange(role))
            await self.cluster.client.call(front.address, "change_role", change, context)

    async def joined(self, *names: str) -> None:
        """Until these workers are registered; one that gave up meanwhile is started again."""
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            for name in names:
                while not await self._is_known(name):
                    if self.child(name).exit_code is not None:
                        self.num_unplanned_exits += 1
                        assert self.num_unplanned_exits < MAX_UNPLANNED_EXITS, (
                            f"{name}: {self.child(name).log_tail()}"
                        )
                        await self.start(name)
                    await asyncio.sleep(0.05)

    async def _is_known(self, name: str) -> bool:
        try:
            instances = await self.cluster.instances()
        except TandemError:
            return False
        pid = self.child(name).pid
        for instance in instances:
            if instance.pid == pid:
                self.slots[name].instance_ids[pid] = instance.instance_id
                self._note_ranks(name)
                return True
        return False

    def _note_ranks(self, name: str) -> None:
        slot = self.slots[name]
        if name not in self.crew.wide:
            return
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended: the ranks known before hold
            slot.ranks = psutil.Process(self.child(name).pid).children()

    # ---- at the end ---------------------------------------------------------------------------

    async def lost_blocks(self) -> dict[str, int]:
        """Worker |-> blocks that are neither free nor cached, long after the last request."""
        deadline_at = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            held = {}
            for worker in await self._statuses():
                load = worker.load
                busy = load.num_running + load.num_waiting
                missing = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
                unsettled = int(worker.details.get("num_open_handoffs", 0))
                if missing or busy or unsettled or worker.details.get("num_jobs", 0):
                    held[worker.instance.instance_id] = missing
            if not held or time.monotonic() > deadline_at:
                return held
            await asyncio.sleep(0.1)

    async def _statuses(self) -> list[WorkerStatus]:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while True:
                with contextlib.suppress(TandemError):
                    statuses = [
                        *await self.cluster.statuses("prefill"),
                        *await self.cluster.statuses("decode"),
                    ]
                    workers = {status.instance.instance_id: status for status in statuses}
                    if len(workers) == len(self.slots):
                        return list(workers.values())
                await asyncio.sleep(0.1)

    def events(self) -> list[dict[str, Any]]:
        """What the workers noted, dead ones too, in order of time."""
        noted: list[dict[str, Any]] = []
        for path in self._run_dir.glob("*/events.jsonl"):
            lines = path.read_text().splitlines()
            noted += [{"worker": path.parent.name, **json.loads(line)} for line in lines]
        return sorted(noted, key=lambda event: float(event["at"]))


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
