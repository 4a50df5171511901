import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from tandem.runtime.errors import TransferError
from tandem.transfer.agent import KvPoolView, TransferAgent
from tandem.transfer.config import TransferConfig
from tandem.transfer.landed import decode_landed, encode_landed
from tandem.transfer.layout import KvLayout

MakePool = Callable[..., KvPoolView]
SpawnPeer = Callable[..., Any]


@asynccontextmanager
async def running(
    kv: KvPoolView,
    layout: KvLayout,
    name: str,
    epoch: str = "e1",
    config: TransferConfig | None = None,
    heard: list[bytes] | None = None,
) -> AsyncIterator[TransferAgent]:
    agent = TransferAgent(config or TransferConfig(), layout, kv, name, epoch)
    await agent.start((heard if heard is not None else []).append)
    try:
        yield agent
    finally:
        await agent.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("backend", ["nixl", "loopback"])
async def test_blocks_written_in_one_process_arrive_and_are_announced(
    backend: str, make_pool: MakePool, layout: KvLayout
) -> None:
    source, target = make_pool(16), make_pool(16, fill="zero")
    config = TransferConfig.model_validate({"backend": backend})
    heard: list[bytes] = []
    async with (
        running(source, layout, "p", config=config) as p,
        running(target, layout, "d", config=config, heard=heard) as d,
    ):
        d.expect(+1)
        await p.connect(d.metadata())
        pairs = [(3, 8), (4, 9), (5, 10), (0, 2), (15, 0)]
        await p.write("d", "e1", pairs, b"arrived")
        await until(lambda: heard == [b"arrived"])
        for local, remote in pairs:
            arrived = target.tensor[remote].view(torch.uint8)
            assert torch.equal(source.tensor[local].view(torch.uint8), arrived)
        assert target.tensor[[1, 3, 4, 5, 6, 7, 11]].float().abs().sum() == 0
        d.expect(-1)


async def test_blocks_written_to_another_process_match_their_checksums(
    make_pool: MakePool, layout: KvLayout, spawn_peer: SpawnPeer
) -> None:
    peer = await spawn_peer("d", "e1")
    async with running(make_pool(64), layout, "p") as p:
        await p.connect(await peer.metadata)
        for attempt in range(3):
            local, remote = list(range(attempt, 40)), list(range(63, 23 + attempt, -1))
            sums = await p.checksums(local)
            notice = encode_landed(
                bytes(16), attempt, b"s" * 16, 0, 1, list(zip(remote, sums, strict=True))
            )
            await p.write("d", "e1", list(zip(local, remote, strict=True)), notice)
            landed = decode_landed(await peer.notification())
            assert landed is not None and landed.attempt == attempt
            assert await peer.checksums(remote) == [checksum for _, checksum in landed.blocks]
        await p.notify("d", b"nothing written")
        assert await peer.notification() == b"nothing written"
        assert p.longest_write_s > 0


async def test_a_restarted_peer_is_written_to_under_its_new_epoch_only(
    make_pool: MakePool, layout: KvLayout, spawn_peer: SpawnPeer
) -> None:
    async with running(make_pool(8), layout, "p") as p:
        first = await spawn_peer("d", "e1")
        await p.connect(await first.metadata)
        await p.write("d", "e1", [(0, 0)], b"one")
        await first.kill()
        with pytest.raises(TransferError):
            await p.write("d", "e1", [(0, 0)], b"to the dead")
        second = await spawn_peer("d", "e2")
        await p.connect(await second.metadata)
        await p.connect(await second.metadata)
        with pytest.raises(TransferError, match=r"d\.e1: not connected"):
            await p.write("d", "e1", [(0, 0)], b"old")
        await p.write("d", "e2", [(7, 5)], b"new")
        assert await second.notification() == b"new"
        assert await second.checksums([5]) == await p.checksums([7])


async def test_a_stopped_peer_fails_the_write_within_its_timeout_and_only_its_own(
    make_pool: MakePool, layout: KvLayout, spawn_peer: SpawnPeer
) -> None:
    stopped, alive = await asyncio.gather(spawn_peer("d1", "e1"), spawn_peer("d2", "e1"))
    config = TransferConfig(write_timeout_s=0.5)
    async with running(make_pool(8), layout, "p", config=config) as p:
        for peer in (stopped, alive):
            await p.connect(await peer.metadata)
        await p.write("d1", "e1", [(0, 0)], b"warm")
        os.kill(stopped.process.pid, signal.SIGSTOP)
        process = psutil.Process(stopped.process.pid)
        await until(lambda: process.status() == psutil.STATUS_STOPPED)
        try:
            hanging = asyncio.create_task(p.write("d1", "e1", [(0, 0)], b"hangs"))
            await p.write("d2", "e1", [(1, 1)], b"goes on")
            assert not hanging.done()
            with pytest.raises(TransferError, match=r"more than 0\.5 s"):
                await asyncio.wait_for(hanging, 5)
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        assert await alive.notification() == b"goes on"
        await p.connect(await stopped.metadata)
        await p.write("d1", "e1", [(2, 2)], b"again")
        assert await stopped.checksums([2]) == await p.checksums([2])


async def test_different_layouts_are_refused_by_naming_both_and_decoding_nothing(
    make_pool: MakePool, layout: KvLayout
) -> None:
    other = replace(layout, head_dim=64)
    config = TransferConfig(backend="loopback")
    async with (
        running(make_pool(4), layout, "p", config=config) as p,
        running(make_pool(4, other), other, "d", config=config) as d,
    ):
        metadata = msgspec.structs.replace(d.metadata(), agent_metadata=b"\xff not decodable")
        with pytest.raises(TransferError) as caught:
            await p.connect(metadata)
    assert "p has [v1 layers=2 kv_heads=2 block_size=16 head_dim=32" in caught.value.message
    assert "d has [v1 layers=2 kv_heads=2 block_size=16 head_dim=64" in caught.value.message


async def test_metadata_of_another_agent_is_refused(make_pool: MakePool, layout: KvLayout) -> None:
    config = TransferConfig(backend="loopback")
    async with (
        running(make_pool(4), layout, "p", config=config) as p,
        running(make_pool(4), layout, "d", config=config) as d,
    ):
        forged = msgspec.structs.replace(d.metadata(), epoch="e9")
        with pytest.raises(TransferError, match=r"d\.e9 is that of d\.e1"):
            await p.connect(forged)


async def test_a_write_outside_either_pool_or_after_its_lease_is_not_posted(
    make_pool: MakePool, layout: KvLayout
) -> None:
    source, target = make_pool(4), make_pool(8, fill="zero")
    config = TransferConfig(backend="loopback")
    heard: list[bytes] = []
    async with (
        running(source, layout, "p", config=config) as p,
        running(target, layout, "d", config=config, heard=heard) as d,
    ):
        await p.connect(d.metadata())
        for pairs in ([(4, 0)], [(0, 8)], [(-1, 0)], [(0, -1)]):
            with pytest.raises(TransferError, match="out of range"):
                await p.write("d", "e1", pairs, b"wrong")
        with pytest.raises(TransferError, match="no blocks"):
            await p.write("d", "e1", [], b"wrong")
        with pytest.raises(TransferError, match="lease is over"):
            await p.write("d", "e1", [(0, 0)], b"late", post_before=0.0)
        await p.write("d", "e1", [(0, 0)], b"right", post_before=float("inf"))
        await until(lambda: heard == [b"right"])


async def test_a_closed_agent_refuses_work_and_closes_twice(
    make_pool: MakePool, layout: KvLayout
) -> None:
    async with running(make_pool(4), layout, "p") as p:
        await p.close()
        with pytest.raises(TransferError, match="not running"):
            await p.checksums([0])


async def test_garbage_as_agent_metadata_is_a_transfer_error(
    make_pool: MakePool, layout: KvLayout
) -> None:
    async with running(make_pool(4), layout, "p") as p:
        for garbage in (b"", b"garbage", bytes(400)):
            metadata = msgspec.structs.replace(
                p.metadata(), instance_id="d", agent_metadata=garbage
            )
            with pytest.raises(TransferError, match="NIXL"):
                await p.connect(metadata)
        assert len(await p.checksums([0, 1])) == 2
