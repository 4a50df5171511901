import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import RankMetadata
from tandem.transfer.agents import agent as agent_module
from tandem.transfer.agents.agent import TransferAgent
from tandem.transfer.agents.reactor import PeerRank, Selection
from tandem.transfer.config import TransferConfig
from tandem.transfer.cuda_context import begin_settling
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import BlockGrid
from tests.transfer.pools import Pool

MakePool = Callable[..., Pool]

D = PeerRank("d", "e1", 0)
LOOPBACK = TransferConfig(backend="loopback")


@asynccontextmanager
async def running(
    kv: Pool,
    layout: KvLayout,
    name: str,
    config: TransferConfig = LOOPBACK,
    heard: "asyncio.Queue[bytes] | None" = None,
) -> AsyncIterator[TransferAgent]:
    agent = TransferAgent(config, layout, kv, name, "e1")
    inbox: asyncio.Queue[bytes] = asyncio.Queue() if heard is None else heard
    await agent.start(inbox.put_nowait)
    try:
        yield agent
    finally:
        await agent.close()


def grid_of(metadata: RankMetadata, layout: KvLayout, num_blocks: int) -> BlockGrid:
    address, device = metadata.base_address, metadata.device_id
    return BlockGrid(address, layout.block_bytes, num_blocks, "DRAM", device)


async def meet(agent: TransferAgent, other: TransferAgent, layout: KvLayout, blocks: int) -> None:
    metadata = other.metadata()
    await agent.connect(D, metadata.agent_metadata, grid_of(metadata, layout, blocks))


def whole(layout: KvLayout) -> Selection:
    parts = layout.layer_parts([layout.num_layers])
    return Selection(parts, parts, range(1))


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), MemoryError("no"), RuntimeError("CUDA error: no"), TransferError("no")],
)
async def test_whatever_is_raised_before_a_post_is_a_transfer_error_and_nothing_is_posted(
    error: Exception, make_pool: MakePool, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a GPU without memory for checksums: blocks of a write with another end stay pinned."""
    target = make_pool(4, fill="zero")
    async with running(make_pool(4), layout, "p") as p, running(target, layout, "d") as d:
        await meet(p, d, layout, 4)
        parts = ((0, layout.head_bytes),)

        def fail(*_: object) -> Any:
            raise error

        with pytest.raises(TransferError, match="no"):
            await p.transfer("WRITE", D, whole(layout), [(0, 0)], fail)
        with monkeypatch.context() as patch:
            patch.setattr(agent_module, "checksum_steps", fail)
            with pytest.raises(TransferError, match="no"):
                await p.transfer("WRITE", D, whole(layout), [(0, 0)], checked=parts)
            with pytest.raises(TransferError, match="no"):
                await d.checksums([0], parts)
        assert not target.tensor.any()
        await p.transfer("WRITE", D, whole(layout), [(0, 0)], lambda _: b"fine")


class Event:
    """Stands for a CUDA event of a prefill step that is still running."""

    has_happened = False

    def query(self) -> bool:
        return self.has_happened


async def test_a_write_of_layers_that_are_not_computed_yet_holds_up_no_other_transfer(
    make_pool: MakePool, layout: KvLayout
) -> None:
    source, event = make_pool(4), Event()
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    parts = layout.layer_parts([layout.num_layers])
    async with (
        running(source, layout, "p") as p,
        running(make_pool(4, fill="zero"), layout, "d", heard=heard) as d,
    ):
        await meet(p, d, layout, 4)

        def notice(sums: Sequence[int]) -> bytes:
            return repr(sums).encode()

        held = asyncio.create_task(
            p.transfer("WRITE", D, whole(layout), [(1, 1)], notice, checked=parts, after=event)
        )
        await asyncio.sleep(0)  # it is handed to the transfer thread, before the next one
        await p.transfer("WRITE", D, whole(layout), [(0, 0)], notice)
        assert await heard.get() == b"[]" and not held.done()
        source.tensor[1].fill_(1.0)
        event.has_happened = True
        expected = repr(await p.checksums([1], parts)).encode()
        assert await held == expected == await heard.get()


async def test_closing_fails_a_write_whose_event_never_happens(
    make_pool: MakePool, layout: KvLayout
) -> None:
    parts = layout.layer_parts([layout.num_layers])
    async with running(make_pool(4), layout, "p") as p, running(make_pool(4), layout, "d") as d:
        await meet(p, d, layout, 4)
        held = asyncio.create_task(
            p.transfer("WRITE", D, whole(layout), [(1, 1)], checked=parts, after=Event())
        )
        await asyncio.sleep(0)  # it is handed to the transfer thread
        await p.close()
        with pytest.raises(TransferError, match=r"transfer agent p\.e1\.0 closes"):
            await held


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_is_settled_when_its_work_is_done_and_not_when_it_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = threading.Event()

    def synchronize(device_id: int) -> None:
        assert device_id == 3 and is_done.wait(60)
        if fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    is_settled = begin_settling(3)
    (waiting,) = [thread for thread in threading.enumerate() if "settling" in thread.name]
    assert not is_settled()
    is_done.set()
    waiting.join(60)
    assert is_settled() is not fails


async def test_a_cancelled_caller_stops_waiting_and_its_transfer_still_arrives(
    make_pool: MakePool, layout: KvLayout
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    async with (
        running(make_pool(4), layout, "p") as p,
        running(make_pool(4, fill="zero"), layout, "d", heard=heard) as d,
    ):
        await meet(p, d, layout, 4)
        writing = asyncio.create_task(
            p.transfer("WRITE", D, whole(layout), [(1, 1)], lambda _: b"arrived")
        )
        await asyncio.sleep(0)  # it is handed to the transfer thread
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await heard.get() == b"arrived"


async def test_a_closed_agent_refuses_work_and_closes_twice(
    make_pool: MakePool, layout: KvLayout
) -> None:
    async with running(make_pool(4), layout, "p", TransferConfig()) as p:
        await p.close()
        with pytest.raises(TransferError, match="not running"):
            await p.checksums([0], layout.layer_parts([layout.num_layers]))


async def test_garbage_as_agent_metadata_is_a_transfer_error(
    make_pool: MakePool, layout: KvLayout
) -> None:
    async with running(make_pool(4), layout, "p", TransferConfig()) as p:
        grid = grid_of(p.metadata(), layout, 4)
        for garbage in (b"", b"garbage", bytes(400)):
            with pytest.raises(TransferError, match="NIXL"):
                await p.connect(D, garbage, grid)
        assert len(await p.checksums([0, 1], layout.layer_parts([layout.num_layers]))) == 2


async def test_an_agent_whose_transport_cannot_start_says_so_and_closes(
    make_pool: MakePool, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (TransferError("no backend"), OSError("no device")):

        def fail(config: TransferConfig, name: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(agent_module, "open_transport", fail)
        agent = TransferAgent(LOOPBACK, layout, make_pool(4), "p", "e1")
        with pytest.raises(type(error), match="no "):
            await agent.start(lambda data: None)
        await agent.close()


def test_a_pool_of_another_layout_is_refused(make_pool: MakePool, layout: KvLayout) -> None:
    other = KvLayout(layout.num_layers, layout.num_kv_heads, 8, layout.head_dim, layout.dtype)
    with pytest.raises(TransferError, match="blocks are 4096 bytes, the pool's 8192"):
        TransferAgent(LOOPBACK, other, make_pool(4), "p", "e1")
