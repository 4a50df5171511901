"""Transfers between two processes, by our agents and by the bare library in turns."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from tandem.bench.handoff.end import DEADLINE_S, End, PoolShape
from tandem.bench.handoff.peer import (
    LOOP_PING,
    PING,
    VERIFY,
    WROTE,
    Checksums,
    Expect,
    Meet,
    Peer,
    Receive,
    peer_process,
    whole_checksums,
)
from tandem.bench.report.setting import seconds_of
from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.transfer.agents.group import WriteOrder
from tandem.transfer.agents.link import Link
from tandem.transfer.agents.reactor import HELLO

Pairs = Sequence[tuple[int, int]]
AGENTS, CHECKED = "agents", "agents with checksums"
BARE, PAUSING = "bare library", "bare library, pausing"
PAUSE_S = 20e-6  # where cores are few, a loop without one can delay the process that it waits for
LOOPS = "poll loops"


@dataclass(slots=True)
class Wire:
    """The near end, the far end, and the link between them."""

    end: End
    peer: Peer
    far: TransferMetadata
    link: Link
    pings: "asyncio.Queue[float]" = field(default_factory=asyncio.Queue)  # when each came back
    verified: "asyncio.Queue[list[int]]" = field(default_factory=asyncio.Queue)
    num_received: list[int] = field(default_factory=lambda: [0])  # writes of the far end

    @contextlib.asynccontextmanager
    async def expecting(self) -> AsyncIterator[None]:
        """Let both ends' agents poll as they do while a handoff is under way."""
        self.end.group.expect(+1)
        await self.peer.ask(Expect(+1))
        try:
            yield
        finally:
            await self.peer.ask(Expect(-1))
            self.end.group.expect(-1)

    async def write(self, pairs: Pairs, *, checked: bool, notice: bytes = HELLO) -> None:
        """Write whole blocks by our agents."""
        layers = range(self.end.group.layout.num_layers)
        (ranks,) = self.link.rank_pairs
        order = WriteOrder(ranks, layers, pairs, lambda _: notice, checked=checked)
        await self.end.group.write(self.link, order)

    async def read(self, pairs: Pairs) -> None:
        """READ whole blocks by our agents, with their checksums."""
        (ranks,) = self.link.rank_pairs
        await self.end.group.read(self.link, ranks, pairs)

    async def reconnect(self) -> None:
        """Tear the near end's connection down, under its writes, and make another."""
        await self.end.group.disconnect("far")
        self.link = await self.end.group.connect(self.far)

    async def far_checksums(self, blocks: list[int]) -> list[int]:
        """Return the checksums of blocks of the far end."""
        return (await self.peer.ask(Checksums(blocks))).checksums

    async def write_and_verify(self, blocks: list[int]) -> list[int]:
        """Write blocks, and return their checksums as the far end sees them on their notice."""
        notice = VERIFY + msgspec.json.encode(blocks)
        await self.write([(block, block) for block in blocks], checked=False, notice=notice)
        async with asyncio.timeout(DEADLINE_S):
            return await self.verified.get()


@contextlib.asynccontextmanager
async def wire(shape: PoolShape) -> AsyncIterator[Wire]:
    """Yield two connected ends, the far one in a process of its own."""
    pings: asyncio.Queue[float] = asyncio.Queue()
    verified: asyncio.Queue[list[int]] = asyncio.Queue()
    num_received = [0]

    def on_message(message: bytes) -> None:
        if message == PING:
            pings.put_nowait(time.perf_counter())
        elif message == WROTE:
            num_received[0] += 1
        elif message.startswith(VERIFY):
            verified.put_nowait(msgspec.json.decode(message[len(VERIFY) :], type=list[int]))

    async with peer_process(shape) as peer:
        end = End(shape, "near")
        try:
            await end.start(on_message)
            hello = await peer.hello()
            agents, bare = end.metadata()
            await peer.ask(Meet(agents, bare))
            link = await end.group.connect(hello.agents)
            assert end.bare is not None
            end.bare.connect(hello.bare)
            yield Wire(end, peer, hello.agents, link, pings, verified, num_received)
        finally:
            await end.close()


def adjacent(num_blocks: int) -> list[tuple[int, int]]:
    """Return blocks that lie side by side at both ends."""
    return [(block, block) for block in range(num_blocks)]


def in_runs(num_blocks: int, run_length: int) -> list[tuple[int, int]]:
    """Return blocks in runs that lie in one order here and in the opposite one at the far end."""
    starts = range(num_blocks - run_length, -1, -run_length)
    remote = [block for start in starts for block in range(start, start + run_length)]
    return list(enumerate(remote))


async def time_writes(wire: Wire, pairs: Pairs, how: str, count: int) -> list[float]:
    """Return the seconds of each of `count` writes, from its call to its known arrival."""
    if how in (BARE, PAUSING):
        bare, pause_s = wire.end.bare, PAUSE_S if how == PAUSING else 0.0
        assert bare is not None
        wire.peer.tell(Receive(b"write", count, pause_s=pause_s))
        samples = [seconds_of(lambda: bare.write(pairs, pause_s)) for _ in range(count)]
        await wire.peer.answer()
        return samples
    async with wire.expecting():
        return [await timed(wire.write(pairs, checked=how == CHECKED)) for _ in range(count)]


async def time_reads(wire: Wire, pairs: Pairs, count: int) -> list[float]:
    """Return the seconds of each of `count` READs by our agents."""
    async with wire.expecting():
        return [await timed(wire.read(pairs)) for _ in range(count)]


async def check_arrival(wire: Wire, pairs: Pairs) -> None:
    """Raise TransferError unless the far end holds the near end's bytes."""
    sent = await whole_checksums(wire.end, [local for local, _ in pairs])
    answer = await wire.peer.ask(Checksums([remote for _, remote in pairs]))
    if sent != answer.checksums:
        raise TransferError("the far end holds other bytes than were sent")


async def time_round_trips(wire: Wire, count: int, *, bare: bool = False) -> list[float]:
    """Return the seconds from a notification to its answer, `count` times."""
    if bare:
        library = wire.end.bare
        assert library is not None

        def call() -> None:
            library.send(PING)
            library.receive(PING, 1)

        wire.peer.tell(Receive(PING, count, answers=True))
        samples = [seconds_of(call) for _ in range(count)]
        await wire.peer.answer()
        return samples

    samples = []
    async with wire.expecting():
        for _ in range(count):
            started_at = time.perf_counter()
            await wire.end.group.notify("far", PING)
            async with asyncio.timeout(DEADLINE_S):
                samples.append(await wire.pings.get() - started_at)
    return samples


async def time_loop_round_trips(wire: Wire, count: int) -> list[float]:
    """Return the seconds between the poll loops of both agents, without the hop to asyncio."""
    aio, over = asyncio.get_running_loop(), asyncio.Event()
    arrived_at: list[float] = []

    def on_ping() -> bool:
        arrived_at.append(time.perf_counter())
        if len(arrived_at) == count + 1:
            aio.call_soon_threadsafe(over.set)
        return len(arrived_at) <= count

    async with wire.expecting():
        with wire.end.answering(LOOP_PING, "far", on_ping):
            await wire.end.group.notify("far", LOOP_PING)
            async with asyncio.timeout(DEADLINE_S):
                await over.wait()
    return [after - before for before, after in itertools.pairwise(arrived_at)]


async def resting_shares(wire: Wire, duration_s: float) -> dict[str, float]:
    """Return the far end's share of a core while nothing moves."""
    far = psutil.Process(wire.peer.pid)

    async def share() -> float:
        before, started_at = sum(far.cpu_times()[:2]), time.perf_counter()
        await asyncio.sleep(duration_s)
        used_s = sum(far.cpu_times()[:2]) - before
        return float(used_s / (time.perf_counter() - started_at))

    idle = await share()
    await wire.peer.ask(Expect(+1))
    await asyncio.sleep(0.1)  # a new handoff is polled for more often
    expecting = await share()
    await wire.peer.ask(Expect(-1))
    return {"idle": idle, "expecting": expecting}


async def timed(call: Coroutine[Any, Any, object]) -> float:
    """Return the seconds that a call takes."""
    started_at = time.perf_counter()
    await call
    return time.perf_counter() - started_at
