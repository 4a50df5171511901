import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.agents.link import Link
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tandem.transfer.loopback import PROCESS_FABRIC, LoopbackTransport
from tandem.transfer.transport import BlockGrid
from tests.transfer.agents.groups import LOOPBACK, MakePool, Start, loopback_pair, write
from tests.transfer.conftest import PeerProcess
from tests.transfer.pools import LAYOUT


async def own_checksums(group: TransferGroup, link: Link, block_ids: list[int]) -> list[int]:
    layers = range(group.layout.num_layers)
    return await group.prefill_checksums(link.rank_pairs[0], layers, block_ids)


async def test_blocks_cross_processes_and_a_restarted_peer_is_reached_under_its_new_epoch_only(
    make_pool: MakePool, start_group: Start, spawn_peer: Callable[..., Any]
) -> None:
    """The restarted one is in this process, which spares another start."""
    p: TransferGroup = await start_group("p", [make_pool(64, num_spare_blocks=8)])
    first: PeerProcess = await spawn_peer("d", "e1", 8)
    heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    pool = make_pool(64, fill="zero")
    second: TransferGroup = await start_group("d", [pool], epoch="e2", heard=heard)
    second.expect(+1)
    link = await p.connect(first.metadata)
    await p.measure(link)
    assert link.rates is not None and link.rates.wire_bytes_per_s > 0
    for attempt in range(3):
        local, remote = list(range(attempt, 40)), list(range(63, 23 + attempt, -1))
        sent = await write(p, link, list(zip(local, remote, strict=True)), b"%d" % attempt)
        assert await first.notification() == sent
        found = await first.checksums(remote)
        assert found == await own_checksums(p, link, local)
    await p.notify("d", b"nothing written")
    assert await first.notification() == b"nothing written"
    assert p.longest_write_s > 0

    await first.kill()
    with pytest.raises(TransferError):
        await write(p, link, [(0, 0)], b"to the dead")
    assert link.is_broken
    with pytest.raises(TransferError):
        await write(p, await p.connect(first.metadata), [(0, 0)], b"to the dead")
    renewed = await p.connect(second.metadata())
    assert p.links == {"d": renewed} and renewed.rates is None
    with pytest.raises(TransferError, match=r"d\.e1\.0: not connected"):
        await write(p, link, [(0, 0)], b"old")
    assert not renewed.is_broken
    await write(p, renewed, [(7, 5)], b"new")
    assert await heard.get() == (0, b"new")
    found = await second.checksums(renewed.rank_pairs[0], range(LAYOUT.num_layers), [5])
    assert found == await own_checksums(p, renewed, [7])


@pytest.mark.slow
async def test_a_stopped_peer_delays_nobody_else_neither_at_first_contact_nor_later(
    make_pool: MakePool, start_group: Start, spawn_peer: Callable[..., Any]
) -> None:
    config = TransferConfig(write_timeout_s=2.0)
    p: TransferGroup = await start_group("p", [make_pool(8, num_spare_blocks=8)], config=config)
    stopped, alive = await asyncio.gather(spawn_peer("d1", "e1", 8), spawn_peer("d2"))
    to_alive = await p.connect(alive.metadata)
    await stopped.stop()
    try:
        link = await p.connect(stopped.metadata)
        measuring = asyncio.create_task(p.measure(link))
        for i in range(10):
            await write(p, to_alive, [(i % 8, i)], b"goes on")
            assert await alive.notification() == b"goes on"
        assert not measuring.done()
        with pytest.raises(TransferError, match=r"more than 2\.0 s"):
            await measuring
        assert link.is_broken and link.rates is None
    finally:
        stopped.resume()
    link = await p.connect(stopped.metadata)
    await p.measure(link)
    assert link.rates is not None and not link.is_broken
    # After a READ, as the last of a measurement is, one write completes without the peer.
    await write(p, link, [(0, 0)], b"warm")
    assert await stopped.notification() == b"warm"

    await stopped.stop()
    try:
        hanging = asyncio.create_task(write(p, link, [(0, 0)], b"hangs"))
        await write(p, to_alive, [(1, 1)], b"and on")
        assert not hanging.done()
        with pytest.raises(TransferError, match=r"more than 2\.0 s"):
            await hanging
        assert link.is_broken and not to_alive.is_broken
    finally:
        stopped.resume()
    link = await p.connect(stopped.metadata)
    await write(p, link, [(2, 2)], b"again")
    assert await stopped.notification() == b"again"  # and never "hangs"
    found = await stopped.checksums([2])
    assert found == await own_checksums(p, link, [2])


async def test_a_peer_is_connected_once_however_often_and_concurrently_it_is_met(
    make_pool: MakePool, start_group: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = await loopback_pair(make_pool, start_group)
    added: list[bytes] = []
    add_peer = LoopbackTransport.add_peer

    def counting(self: LoopbackTransport, metadata: bytes, grid: BlockGrid) -> str:
        added.append(metadata)
        return add_peer(self, metadata, grid)

    monkeypatch.setattr(LoopbackTransport, "add_peer", counting)
    links = await asyncio.gather(*(p.connect(d.metadata()) for _ in range(5)))
    links.append(await p.connect(d.metadata()))
    assert all(link is links[0] for link in links)
    assert added == [b"d.e1.0"] and p.links == {"d": links[0]}


async def test_a_link_that_broke_is_connected_again_with_the_rates_it_had(
    make_pool: MakePool, start_group: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = await loopback_pair(make_pool, start_group)
    link = await p.connect(d.metadata())
    await p.measure(link)
    monkeypatch.setattr(PROCESS_FABRIC, "failing", {"d.e1.0"})
    with pytest.raises(TransferError, match=r"a WRITE with d\.e1\.0 failed"):
        await write(p, link, [(0, 0)], b"fails")
    assert link.is_broken and [report.is_broken for report in p.reports()] == [True]
    with pytest.raises(TransferError, match="not connected"):
        await p.read(link, link.rank_pairs[0], [(0, 0)])
    monkeypatch.setattr(PROCESS_FABRIC, "failing", set())
    again = await p.connect(d.metadata())
    assert again is not link and not again.is_broken
    assert again.rates is not None and again.rates is link.rates
    await write(p, again, [(0, 0)], b"arrives")


async def test_different_layouts_are_refused_by_naming_both_and_decoding_nothing(
    make_pool: MakePool, start_group: Start, layout: KvLayout
) -> None:
    other = replace(layout, head_dim=64)
    p: TransferGroup = await start_group("p", [make_pool(4)], config=LOOPBACK)
    d: TransferGroup = await start_group("d", [make_pool(4, other)], other, config=LOOPBACK)
    with pytest.raises(TransferError) as caught:
        await p.connect(undecodable(d.metadata()))
    assert "p has [v2 layers=2 kv_heads=2 block_size=16 head_dim=32" in caught.value.message
    assert "d has [v2 layers=2 kv_heads=2 block_size=16 head_dim=64" in caught.value.message
    assert not p.links


async def test_metadata_that_contradicts_itself_is_refused_before_it_is_decoded(
    make_pool: MakePool, start_group: Start
) -> None:
    p, d = await loopback_pair(make_pool, start_group)
    metadata = undecodable(d.metadata())
    for changes, message in (
        ({"ranks": []}, "can't be divided evenly among 0 ranks"),
        ({"ranks": metadata.ranks * 3}, "can't be divided evenly among 3 ranks"),
        ({"ranks": metadata.ranks * 2}, "blocks of 8192 bytes in each of 2 ranks, not 4096"),
        ({"block_bytes": 4096}, "blocks of 4096 bytes in each of 1 ranks, not 8192"),
        ({"num_blocks": 0}, "announces 0 blocks"),
        ({"transport": "nixl"}, "KV layouts differ"),
    ):
        with pytest.raises(TransferError, match=message):
            await p.connect(msgspec.structs.replace(metadata, **changes))


async def test_metadata_of_another_agent_is_refused_and_the_right_one_then_taken(
    make_pool: MakePool, start_group: Start
) -> None:
    p, d = await loopback_pair(make_pool, start_group)
    for forged in ({"epoch": "e9"}, {"instance_id": "d2"}):
        with pytest.raises(TransferError, match=r"is that of d\.e1\.0"):
            await p.connect(msgspec.structs.replace(d.metadata(), **forged))
    await write(p, await p.connect(d.metadata()), [(0, 0)], b"arrives")


async def test_a_peer_that_left_is_forgotten_and_transfers_with_it_fail(
    make_pool: MakePool, start_group: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = await loopback_pair(make_pool, start_group)
    link = await p.connect(d.metadata())
    monkeypatch.setattr(PROCESS_FABRIC, "held", True)
    writing = asyncio.create_task(write(p, link, [(0, 0)], b"under way"))
    await own_checksums(p, link, [0])  # the transfer thread has posted it by now
    await p.disconnect("d")
    with pytest.raises(TransferError, match="disconnected"):
        await writing
    PROCESS_FABRIC.pending.clear()
    assert not p.links
    await p.disconnect("nobody")
    with pytest.raises(TransferError, match="not connected"):
        await p.notify("d", b"message")


def undecodable(metadata: TransferMetadata) -> TransferMetadata:
    ranks = [
        msgspec.structs.replace(rank, agent_metadata=b"\xff not decodable")
        for rank in metadata.ranks
    ]
    return msgspec.structs.replace(metadata, ranks=ranks)
