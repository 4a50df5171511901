"""Agents of ranks in other processes, whose orders go through real sockets: threads serve them."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from tandem.runtime.errors import TransferError
from tandem.transfer.agents.agent_server import serving_orders
from tandem.transfer.agents.group import TransferGroup, WriteOrder
from tandem.transfer.agents.rank_agent import NOTICE_BLOCK, Mark, Notice
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout, RankPair
from tests.services import eventually
from tests.transfer.pools import LAYOUT, Pool, joined, make_pool, make_ranks

LOOPBACK = TransferConfig(backend="loopback")
DEEP = replace(LAYOUT, num_layers=4)
WHOLE = range(4)


@dataclass
class Ranks:
    """A worker's ranks: the first one's pool is in this process, the others are served."""

    layout: KvLayout
    pools: list[Pool]
    order_channels: list[socket.socket] = field(default_factory=list)
    ended_mark: Mark = (1, 4)
    passed: Mark = (1, 4)

    def has_passed(self, mark: Mark) -> bool:
        return self.passed >= mark

    @property
    def blocks(self) -> torch.Tensor:
        return joined(self.pools, self.layout)


@dataclass
class Event:
    """Stands for one of rank 0."""

    mark: Mark
    has_happened: bool = True

    def query(self) -> bool:
        return self.has_happened


@pytest.fixture
def far_ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@asynccontextmanager
async def running(
    name: str,
    width: int,
    far_ends: ExitStack,
    config: TransferConfig = LOOPBACK,
    *,
    fill: str = "random",
    heard: "asyncio.Queue[tuple[int, bytes]] | None" = None,
) -> AsyncIterator[tuple[TransferGroup, Ranks]]:
    layout = replace(DEEP, tp_size=width)
    ranks = Ranks(layout, make_ranks(6, layout, fill=fill))
    for pool in ranks.pools[1:]:
        near, far = socket.socketpair()
        ranks.order_channels.append(near)
        far_ends.enter_context(serving_orders(far, pool, ranks.has_passed))
    group = TransferGroup(config, layout, ranks.pools[:1], name, "e1", ranks)
    inbox = heard or asyncio.Queue()
    await group.start(lambda rank, data: inbox.put_nowait((rank, data)))
    try:
        yield group, ranks
    finally:
        await group.close()


def order_of(
    ranks: RankPair, pairs: Sequence[tuple[int, int]], layers: range = WHOLE, **changes: object
) -> WriteOrder:
    notice = Notice(b"head", [ordinal for ordinal, _ in enumerate(pairs)])
    order = WriteOrder(ranks, layers, pairs, notice, (1, 2, 4))
    return replace(order, **changes)  # type: ignore[arg-type]


def sums_in(notice: bytes) -> list[int]:
    return [checksum for _, checksum in NOTICE_BLOCK.iter_unpack(notice.removeprefix(b"head"))]


@pytest.mark.parametrize(
    ("backend", "widths"),
    [
        *(("loopback", widths) for widths in ((2, 2), (2, 1), (1, 2), (4, 4), (4, 1), (1, 4))),
        *(("nixl", widths) for widths in ((2, 2), (4, 1), (1, 4))),
    ],
)
async def test_every_rank_writes_and_reads_its_heads_with_the_checksums_of_the_other_side(
    backend: str, widths: tuple[int, int], far_ends: ExitStack
) -> None:
    """Of two KV heads; the ranks of a width of 4 have a replica of one each."""
    config = TransferConfig.model_validate({"backend": backend})
    heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    pairs = [(0, 5), (1, 2), (3, 3)]
    local, remote = [list(each) for each in zip(*pairs, strict=True)]
    async with (
        running("p", widths[0], far_ends, config) as (p, source),
        running("d", widths[1], far_ends, config, fill="zero", heard=heard) as (d, target),
    ):
        d.expect(+1)
        link = await p.connect(d.metadata())
        await p.prepare(link, (1, 2, 4))
        for layers in (range(1), range(1, 4)):
            for ranks in link.rank_pairs:
                event = Event((1, layers.stop))
                sent = await p.write(link, order_of(ranks, pairs, layers, after=event))
                assert await heard.get() == (ranks.decode_rank, sent)
                assert sums_in(sent) == await d.checksums(ranks, layers, remote) != [0] * 3
        assert torch.equal(source.blocks[local], target.blocks[remote])
        assert not target.blocks[[0, 1, 4]].any()
        original = source.blocks[local].clone()
        for pool in source.pools:
            pool.tensor.zero_()
        for ranks in link.read_pairs:
            assert await p.read(link, ranks, pairs) == await d.checksums(ranks, WHOLE, remote)
        assert torch.equal(source.blocks[local], original)
        assert p.longest_write_s > 0
        d.expect(-1)


@pytest.mark.parametrize("is_announced", [True, False], ids=["its event", "what has ended"])
async def test_a_rank_writes_once_its_own_device_has_passed_the_mark(
    is_announced: bool, far_ends: ExitStack
) -> None:
    async with (
        running("p", 2, far_ends) as (p, source),
        running("d", 2, far_ends, fill="zero") as (d, target),
    ):
        link = await p.connect(d.metadata())
        first, second = link.rank_pairs
        source.passed, source.ended_mark = (6, 4), (7, 4)
        after = Event((7, 4)) if is_announced else None
        held = asyncio.create_task(p.write(link, order_of(second, [(1, 1)], after=after)))
        await p.write(link, order_of(first, [(1, 1)], after=after))  # rank 0 has its own event
        early = Event((6, 4))
        await p.write(link, order_of(second, [(0, 0)], after=early))  # nor does it wait for that
        assert not held.done() and not target.pools[1].tensor[1].any()
        source.pools[1].tensor[1].fill_(1.0)
        source.passed = (7, 4)
        sent = await held
        assert sums_in(sent) == await d.checksums(second, WHOLE, [1])
        assert torch.equal(target.pools[1].tensor[1], source.pools[1].tensor[1])


async def test_a_rank_posts_nothing_after_the_lease(far_ends: ExitStack) -> None:
    async with (
        running("p", 2, far_ends) as (p, _),
        running("d", 2, far_ends, fill="zero") as (d, target),
    ):
        link = await p.connect(d.metadata())
        late = order_of(link.rank_pairs[1], [(0, 0)], post_before=time.perf_counter() - 1e-3)
        with pytest.raises(TransferError, match=r"WRITE with d\.e1\.1: its lease is over"):
            await p.write(link, late)
        assert link.is_broken and not target.blocks.any()


async def test_a_process_that_ends_fails_what_it_had_to_do_and_all_that_comes(
    far_ends: ExitStack,
) -> None:
    async with (
        running("p", 2, far_ends) as (p, source),
        running("d", 2, far_ends) as (d, _),
    ):
        link = await p.connect(d.metadata())
        source.passed = (0, 0)
        ranks = link.rank_pairs[1]
        held = asyncio.create_task(p.write(link, order_of(ranks, [(1, 1)])))
        await p.write(link, order_of(link.rank_pairs[0], [(1, 1)]))  # the order has been sent
        source.order_channels[0].shutdown(socket.SHUT_RDWR)
        with pytest.raises(TransferError, match=r"the process of p\.e1\.1 has ended"):
            await held
        with pytest.raises(TransferError, match=r"p\.e1\.1 is not running"):
            await p.checksums(ranks, WHOLE, [1])
        p.expect(+1)


async def test_an_agent_that_does_not_open_says_why(far_ends: ExitStack) -> None:
    layout = replace(DEEP, tp_size=2)
    near, far = socket.socketpair()
    ranks = Ranks(layout, [make_pool(6, layout)], [near])
    far_ends.enter_context(serving_orders(far, make_pool(6, DEEP), ranks.has_passed))
    group = TransferGroup(LOOPBACK, layout, ranks.pools, "p", "e1", ranks)
    try:
        with pytest.raises(TransferError, match=r"the layout's blocks are \d+ bytes"):
            await group.start(lambda rank, data: None)
    finally:
        await group.close()


async def test_closing_a_group_gives_the_pools_of_all_ranks_back(far_ends: ExitStack) -> None:
    async with running("p", 2, far_ends) as (p, source):
        async with running("d", 2, far_ends) as (d, _):
            link = await p.connect(d.metadata())
        for ranks in link.rank_pairs:
            with pytest.raises(TransferError):
                await p.write(link, order_of(ranks, [(0, 0)]))
        await p.disconnect("d")
        await p.close()
        await eventually(lambda: source.order_channels[0].fileno() == -1)
