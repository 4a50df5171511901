"""What happens to the fleet and when: drawn from a seed, one fault at a time on each lane."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from tandem.runtime.errors import TandemError
from tandem.runtime.wire.cluster_messages import WorkerRole
from tests.soak.fleet import BOTH_CREW, Crew, Fleet
from tests.soak.points import POINTS
from tests.soak.proxy import Proxy

Kind = Literal["kill", "stop", "restart", "cut", "role"]
ROLE_LANES = ("roles0", "roles1")  # two, so that two changes meet
ALL_LOOSE_SHARE = 0.3  # of the faults on the steady workers' lane
AT_A_POINT_SHARE = 0.8  # of kills and stops: right in the middle of a handoff
RANK_SHARE = 0.5  # of the faults of a worker of several ranks: those of a rank alone
SHORT_STOP_S = 0.3  # of a rank, which then goes on
LONG_STOP_S = 3.0  # more than a rank may stand
POINT_TIMEOUT_S = 3.0  # then it happens anyway, wherever the worker is
MEND_PAUSE_S = 0.5  # after a worker is back, until everybody has heard of it


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` happens to `targets`, all at once, for `duration_s`, `pause_s` after the one before.

    `cut`: which of a worker's ways are cut: nats, etcd, links (to the decode workers), front (from
    everybody). `empty`: a service comes back without its store. `point`: of a handoff, or of a
    change of roles, of the worker at which it happens, if one comes along in time. `role`: the one
    that the worker is asked to have. `rank`: of this one alone, above 0, which ends the worker
    unless it is a short stop.
    """

    kind: Kind
    targets: tuple[str, ...]
    duration_s: float
    pause_s: float
    cut: str = ""
    empty: bool = False
    point: str = ""
    role: WorkerRole | None = None
    rank: int = 0

    def __str__(self) -> str:
        what = f"cut {self.cut} of" if self.cut else self.role or self.kind
        what += f" rank {self.rank} of" if self.rank else ""
        where = f" {self.point}" if self.point else ""
        return f"{what} {'+'.join(self.targets)}{where}{' (empty)' if self.empty else ''}"


@dataclass(slots=True)
class Happened:
    """A fault that was carried out. Times are time.monotonic()."""

    fault: Fault
    began_at: float
    ended_at: float = float("inf")  # when the victims were whole again
    instance_ids: list[str] = field(default_factory=list)  # of the workers it struck
    error: TandemError | None = None  # of a change of roles

    def strikes(self, *kinds: str) -> bool:
        return self.fault.kind in kinds


def lanes(crew: Crew) -> tuple[str, ...]:
    """Return the places at which faults happen one at a time.

    Every loose worker at once is struck on the lane of the steady ones: no request may fail then,
    so no steady worker may be struck meanwhile.
    """
    roles = ROLE_LANES if crew.loose == BOTH_CREW.loose else ()
    return (*crew.loose, "steady", "services", *roles)


def schedule(seed: int, lane: str, crew: Crew) -> Iterator[Fault]:
    """The faults of a lane, endless, the same for the same seed."""
    draw = random.Random(f"{seed} {lane}")
    while True:
        pause_s = draw.uniform(0.5, 3.0)
        duration_s = draw.uniform(0.5, 6.0)
        if lane == "services":
            yield _service_fault(draw, duration_s / 2, pause_s + 3.0)
        elif lane in ROLE_LANES:
            yield _role_change(draw, crew, pause_s / 3)
        elif lane in crew.loose:
            yield _worker_fault(draw, lane, crew, duration_s, pause_s)
        elif draw.random() < ALL_LOOSE_SHARE:
            yield Fault(draw.choice(("kill", "kill", "stop")), crew.loose, duration_s, pause_s)
        else:
            yield _worker_fault(draw, draw.choice(crew.steady), crew, duration_s, pause_s)


def _role_change(draw: random.Random, crew: Crew, pause_s: float) -> Fault:
    name = draw.choice(crew.loose + crew.steady)
    roles: tuple[WorkerRole, ...] = ("decode", "both", "prefill")
    role = draw.choice(roles if name in crew.loose else roles[:2])
    return Fault("role", (name,), 0.0, pause_s, role=role)


def _worker_fault(
    draw: random.Random, name: str, crew: Crew, duration_s: float, pause_s: float
) -> Fault:
    one = (name,)
    if name in crew.wide and draw.random() < RANK_SHARE:
        rank = draw.randrange(1, crew.tp)
        if draw.random() < 0.5:
            return Fault("kill", one, duration_s / 3, pause_s, rank=rank)
        stopped_s = draw.choice((SHORT_STOP_S, LONG_STOP_S))
        return Fault("stop", one, stopped_s, pause_s, rank=rank)
    choice = draw.choice(("kill", "kill", "stop", "stop", "restart", "nats", "etcd", "plane"))
    if choice in ("kill", "stop"):
        points = [*POINTS[crew.role_of(name)]]
        point = draw.choice(points) if draw.random() < AT_A_POINT_SHARE else ""
        lasts_s = duration_s / 3 if choice == "kill" else duration_s
        return Fault("kill" if choice == "kill" else "stop", one, lasts_s, pause_s, point=point)
    if choice == "restart":
        return Fault("restart", one, 0.0, pause_s)
    planes = ["links"] * (name in crew.prefill) + ["front"] * (name in crew.decode)
    plane = draw.choice(planes)
    return Fault("cut", one, duration_s, pause_s, cut=plane if choice == "plane" else choice)


def _service_fault(draw: random.Random, duration_s: float, pause_s: float) -> Fault:
    service = (draw.choice(("nats", "etcd")),)
    kind: Kind = draw.choice(("kill", "stop", "cut"))
    if kind == "kill":
        return Fault("kill", service, duration_s, pause_s, empty=draw.random() < 0.3)
    return Fault(kind, service, duration_s, pause_s, cut=service[0] if kind == "cut" else "")


class Nemesis:
    """Carries the schedules out until it is told to end; `happened` is its diary."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.happened: list[Happened] = []
        self._fleet = fleet
        self._seed = seed
        self._ending = asyncio.Event()
        self._struck = {name: asyncio.Lock() for name in fleet.slots}

    async def run(self) -> None:
        """Until `end`; then every fault under way is seen through, and the fleet is whole."""
        async with asyncio.TaskGroup() as group:
            for lane in lanes(self._fleet.crew):
                group.create_task(self._run_lane(lane), name=lane)

    async def wait(self) -> None:
        """Until `end`, in peace."""
        await self._ending.wait()

    def end(self) -> None:
        self._ending.set()

    async def _run_lane(self, lane: str) -> None:
        for fault in schedule(self._seed, lane, self._fleet.crew):
            await self._sleep(fault.pause_s)
            if self._ending.is_set():
                return
            if fault.role is not None:
                await self._change_role(fault, fault.role)
                continue
            async with self._held(fault), self._noted(fault) as note:
                if lane == "services":
                    await self._strike_service(fault)
                    continue
                if fault.point:
                    note.began_at = await self._await_point(fault)
                await self._strike_workers(fault)

    async def _change_role(self, fault: Fault, role: WorkerRole) -> None:
        """Whatever else happens to the worker meanwhile."""
        async with self._noted(fault) as note:
            try:
                await self._fleet.change_role(fault.targets[0], role)
            except TandemError as error:
                note.error = error

    async def _sleep(self, seconds: float) -> None:
        """Shorter when the end has come."""
        try:
            await asyncio.wait_for(self._ending.wait(), seconds)
        except TimeoutError:
            return

    @asynccontextmanager
    async def _held(self, fault: Fault) -> AsyncIterator[None]:
        """Nothing else happens to these workers meanwhile."""
        async with AsyncExitStack() as stack:
            for name in fault.targets:
                if name in self._struck:
                    await stack.enter_async_context(self._struck[name])
            yield

    @asynccontextmanager
    async def _noted(self, fault: Fault) -> AsyncIterator[Happened]:
        slots = [self._fleet.slots[name] for name in fault.targets if name in self._fleet.slots]
        pids = [self._fleet.child(slot.name).pid for slot in slots]
        struck = [slot.instance_ids.get(pid, "") for slot, pid in zip(slots, pids, strict=True)]
        note = Happened(fault, time.monotonic(), instance_ids=struck)
        self.happened.append(note)
        yield note
        note.ended_at = time.monotonic()

    async def _await_point(self, fault: Fault) -> float:
        """Until the worker has struck itself there, or no handoff comes along; when that was."""
        (name,) = fault.targets
        trap = self._fleet.slots[name].trap
        assert trap is not None and fault.kind in ("kill", "stop")
        trap.arm(fault.point, "kill" if fault.kind == "kill" else "stop")
        try:
            return await trap.fired(POINT_TIMEOUT_S)
        except TimeoutError:
            trap.disarm()
            return time.monotonic()

    async def _strike_workers(self, fault: Fault) -> None:
        fleet, names = self._fleet, fault.targets
        if fault.rank:
            await self._strike_rank(fault)
            return
        match fault.kind:
            case "kill":
                await fleet.kill(*names)
                await self._sleep(fault.duration_s)
                await asyncio.gather(*[fleet.start(name) for name in names])
            case "restart":
                await asyncio.gather(*[fleet.terminate(name) for name in names])
                await asyncio.gather(*[fleet.start(name) for name in names])
            case "stop":
                for name in names:
                    fleet.signal(name, signal.SIGSTOP)
                await self._sleep(fault.duration_s)
                for name in names:
                    fleet.signal(name, signal.SIGCONT)
            case "cut":
                proxies = [p for name in names for p in fleet.slots[name].proxies(fault.cut)]
                if fault.cut == "front":
                    links = [slot.links for slot in fleet.slots.values()]
                    proxies += [each[name] for each in links for name in names if name in each]
                await self._cut(proxies, fault.duration_s)
        await fleet.joined(*names)
        await asyncio.sleep(MEND_PAUSE_S)

    async def _strike_rank(self, fault: Fault) -> None:
        fleet, (name,) = self._fleet, fault.targets
        if fault.kind == "kill":
            fleet.signal_rank(name, fault.rank, signal.SIGKILL)
            await fleet.ended(name)
            await self._sleep(fault.duration_s)
        else:
            fleet.signal_rank(name, fault.rank, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            fleet.signal_rank(name, fault.rank, signal.SIGCONT)
            if fault.duration_s >= LONG_STOP_S:
                await fleet.ended(name)
            else:
                await asyncio.sleep(LONG_STOP_S)  # where the machine is too busy, it ends after all
        if fleet.child(name).exit_code is not None:
            await fleet.start(name)
        await fleet.joined(name)
        await asyncio.sleep(MEND_PAUSE_S)

    async def _strike_service(self, fault: Fault) -> None:
        (name,) = fault.targets
        server = self._fleet.cluster.nats if name == "nats" else self._fleet.cluster.etcd
        match fault.kind:
            case "kill":
                await server.restart(empty=fault.empty, down_s=fault.duration_s)
            case "stop":
                server.child.signal(signal.SIGSTOP)
                await self._sleep(fault.duration_s)
                server.child.signal(signal.SIGCONT)
            case "cut":
                await self._cut(self._fleet.ways_to(name), fault.duration_s)
        await asyncio.sleep(MEND_PAUSE_S)

    async def _cut(self, proxies: list[Proxy], duration_s: float) -> None:
        for proxy in proxies:
            proxy.cut()
        await self._sleep(duration_s)
        for number, proxy in enumerate(proxies):
            proxy.heal(reset=number % 2 == 1)
