"""Transfers between two processes on one GPU: their ends, and what outlives a process."""

import asyncio
import os
import signal
import time
from contextlib import suppress

import psutil
import torch

from tandem.bench.handoff.end import End
from tandem.bench.handoff.gpu_sections import shape_for
from tandem.bench.handoff.peer import Checksums, Meet, peer_process, whole_checksums
from tandem.bench.handoff.wire import Wire, adjacent, wire
from tandem.bench.report.figures import Figure, at_most, counted
from tandem.bench.report.setting import Setting, synchronize
from tandem.runtime.errors import TransferError

GIB = 1 << 30


async def visibility(setting: Setting) -> list[Figure]:
    """Write new bytes again and again; the far end checksums them as soon as it has the notice."""
    num_rounds, wrong = setting.size(2000, 20), list[str]()
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
    return [counted("unseen", label, len(wrong), notes=tuple(wrong[:5]))]


async def ipc_lifetime(setting: Setting) -> list[Figure]:
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
                between = Wire(end, peer, link)
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
    return [
        Figure(
            f"taken_{name}",
            f"memory of a dead peer still taken, {name.replace('_', ' ')}",
            "GiB",
            ((free[0] - free[at]) / GIB,),
            at_most(0.5) if name == "after_disconnect" else None,
        )
        for name, at in names.items()
    ]


def _free_bytes(setting: Setting) -> int:
    if setting.is_dry:
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(setting.device)[0]


async def late_write(setting: Setting) -> list[Figure]:
    """Tear a connection down under a write on a busy GPU: nothing may land after its end."""
    shape, num_changed, num_failed = shape_for(setting, 128), 0, 0
    blocks = list(range(shape.num_blocks))
    for _ in range(setting.size(5, 2)):
        async with wire(shape) as between:
            _keep_busy(setting)
            writing = asyncio.create_task(between.write(adjacent(len(blocks)), checked=False))
            await asyncio.sleep(0.0005)
            await between.end.group.disconnect("far")
            try:
                await writing
            except TransferError:
                num_failed += 1
            at_once = await between.peer.ask(Checksums(blocks))
            synchronize(setting)
            await asyncio.sleep(0.3)
            later = await between.peer.ask(Checksums(blocks))
            pairs = zip(at_once.checksums, later.checksums, strict=True)
            num_changed += sum(before != after for before, after in pairs)
    notes = (f"{num_failed} writes were under way",)
    label = "blocks that changed after the end of their write"
    return [counted("late", label, num_changed, notes=notes)]


def _keep_busy(setting: Setting) -> None:
    """Queue a tenth of a second of work on all multiprocessors."""
    if setting.is_dry:
        return
    a = torch.randn(8192, 8192, device=setting.device, dtype=torch.bfloat16)
    for _ in range(70):
        torch.matmul(a, a)
