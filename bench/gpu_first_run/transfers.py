"""Transfers between two processes on one GPU: their ends, and what outlives a process."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import psutil
import torch

from tandem.bench.handoff.end import DEADLINE_S, End
from tandem.bench.handoff.gpu_sections import shape_for
from tandem.bench.handoff.peer import Meet, Write, peer_process, whole_checksums
from tandem.bench.handoff.wire import Wire, adjacent, wire
from tandem.bench.report.figures import Figure, at_least, at_most, counted, required
from tandem.bench.report.setting import Setting, synchronize
from tandem.runtime.errors import TransferError
from tandem.runtime.membership.node import pid_space
from tandem.runtime.wire.cluster_messages import Instance
from tandem.transfer.peers import is_dead

GIB = 1 << 30
NUM_WRITES = 20  # of a process that is killed after the first


async def visibility(setting: Setting) -> AsyncIterator[Figure]:
    """Write new bytes again and again; the far end checksums them as soon as it has the notice."""
    num_rounds, wrong = setting.size(1000, 20), list[str]()
    async with wire(shape_for(setting, 16)) as between:
        pool = between.end.kv.tensor
        for index in range(num_rounds):
            blocks = [index % 4, 4 + index % 3, 7 + index % 9]
            pool[blocks] = torch.randn_like(pool[blocks])
            synchronize(setting)
            expected = await whole_checksums(between.end, blocks)
            found = await between.write_and_verify(blocks)
            if found != expected:
                wrong.append(f"round {index}: {found} and not {expected}")
    label = f"notices before their bytes, of {num_rounds}"
    yield counted("unseen", label, len(wrong), notes=tuple(wrong[:5]))


async def ipc_lifetime(setting: Setting) -> AsyncIterator[Figure]:
    """Kill a process whose pool was written to, and look for its memory."""
    shape = shape_for(setting, 850)  # 8 GB at each end: the bare library wants equal pools
    end = End(shape, "near")
    await end.start(lambda _: None)
    free = [_free_bytes(setting)]
    try:
        with suppress(TransferError, ConnectionError):
            async with peer_process(shape) as peer:
                hello = await peer.hello()
                await peer.ask(Meet(*end.metadata()))
                link = await end.group.connect(hello.agents)
                between = Wire(end, peer, hello.agents, link)
                async with between.expecting():
                    await between.write(adjacent(8), checked=False)
                free.append(_free_bytes(setting))
                os.kill(peer.pid, signal.SIGKILL)
        free.append(_free_bytes(setting))
        await end.group.disconnect("far")
        deadline = time.perf_counter() + 5
        while _free_bytes(setting) < free[0] - GIB and time.perf_counter() < deadline:
            await asyncio.sleep(0.1)
        free.append(_free_bytes(setting))
    finally:
        await end.close()
    names = {"after_kill": 2, "after_disconnect": 3}
    for name, at in names.items():
        yield Figure(
            f"taken_{name}",
            f"memory of a dead peer still taken, {name.replace('_', ' ')}",
            "GiB",
            ((free[0] - free[at]) / GIB,),
            at_most(0.5) if name == "after_disconnect" else None,
        )


def _free_bytes(setting: Setting) -> int:
    if setting.is_dry:
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(setting.device)[0]


async def late_write(setting: Setting) -> AsyncIterator[Figure]:
    """End writes on a busy GPU, by a torn connection and by a kill: nothing may land later."""
    shape = shape_for(setting, 128)
    blocks, num_rounds, num_changed, num_under_way = list(range(shape.num_blocks)), 4, 0, 0
    async with wire(shape) as between:
        for _ in range(num_rounds):
            between.end.kv.tensor.normal_()  # else a late write would change nothing
            synchronize(setting)
            _keep_busy(setting)
            writing = asyncio.create_task(between.write(adjacent(len(blocks)), checked=False))
            await asyncio.sleep(0.0005)
            await between.reconnect()
            try:
                await writing
            except TransferError:
                num_under_way += 1
            num_changed += await _num_changed(setting, between.far_checksums, blocks)
        yield _under_way(setting, "torn", num_under_way, num_rounds)
        label = "blocks that changed after the end of their write"
        yield counted("late", label, num_changed)
        num_left = await _kill_in_mid_copy(setting, between, blocks)
        between.end.kv.tensor.zero_()  # as the blocks' next owner does
        synchronize(setting)

        async def near_checksums(blocks: list[int]) -> list[int]:
            return await whole_checksums(between.end, blocks)

        num_changed = await _num_changed(setting, near_checksums, blocks)
        yield _under_way(setting, "killed", num_left, NUM_WRITES)
        yield counted("late_of_dead", "blocks that changed after their writer's death", num_changed)


async def _kill_in_mid_copy(setting: Setting, between: Wire, blocks: list[int]) -> int:
    """Kill the far end while it writes; return how many of its writes did not arrive."""
    _keep_busy(setting)
    async with asyncio.timeout(DEADLINE_S):
        await between.peer.ask(Write(blocks, NUM_WRITES))
        while not between.num_received[0]:
            await asyncio.sleep(0)
        os.kill(between.peer.pid, signal.SIGKILL)
        far = Instance("", "", "", "far", "", "", pid=between.peer.pid, pid_space=pid_space())
        while not is_dead(far):
            await asyncio.sleep(0)
    return NUM_WRITES - between.num_received[0]


async def _num_changed(
    setting: Setting, checksums: Callable[[list[int]], Awaitable[list[int]]], blocks: list[int]
) -> int:
    """Return how many blocks change from now on."""
    at_once = await checksums(blocks)
    synchronize(setting)
    await asyncio.sleep(0.3)
    later = await checksums(blocks)
    return sum(before != after for before, after in zip(at_once, later, strict=True))


def _under_way(setting: Setting, name: str, count: int, total: int) -> Figure:
    """Return how many writes their end cut: without one nothing was tried. Not in a dry run."""
    label = f"writes that were under way when they were {name}, of {total}"
    figure = Figure(f"late_{name}", label, "", (float(count),), at_least(1.0))
    return figure if setting.is_dry else required(figure)


def _keep_busy(setting: Setting) -> None:
    """Queue a tenth of a second of work on all multiprocessors."""
    if setting.is_dry:
        return
    a = torch.randn(8192, 8192, device=setting.device, dtype=torch.bfloat16)
    for _ in range(70):
        torch.matmul(a, a)
