"""All transfer agents of a worker, one per rank, and its links to other workers."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import LinkReport, TransferMetadata
from tandem.transfer.agents.agent import TransferAgent
from tandem.transfer.agents.far_agent import FarAgent, OtherRanks
from tandem.transfer.agents.link import Link, LinkRates
from tandem.transfer.agents.link_probe import (
    MIN_JUDGED_BYTES,
    SpareLink,
    complaint_about,
    expected_bytes_per_s,
    measure,
)
from tandem.transfer.agents.rank_agent import Notice, RankAgent
from tandem.transfer.agents.reactor import HELLO, Selection
from tandem.transfer.checksum import checksum_name
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout, RankPair
from tandem.transfer.transport import BlockGrid, Event, KvMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """A write of layers of blocks, over one pair of ranks, with its notice.

    The write is of whole blocks, or of one group of layers that end at `boundaries`.
    """

    ranks: RankPair
    layers: range
    blocks: Sequence[tuple[int, int]]  # (local, remote) ids
    make_notice: Callable[[Sequence[int]], bytes]  # from the checksums; a Notice for a FarAgent
    boundaries: Sequence[int] = ()
    post_before: float | None = None  # perf_counter seconds: too late for the post
    after: Event | None = None  # the data is there once this has happened
    checked: bool = True  # False: no checksums are computed


class TransferGroup:
    """Moves KV blocks between this worker's pools and those of its peers.

    `pools` are those of this process's ranks; those of `others`, of the same shape, follow. A block
    id is valid for every rank: a worker's ranks hold their shares of a block at the same place.
    Failures are TransferErrors.
    """

    byte_scale = 1.0  # bytes that each byte of a pool stands for, to all who predict or count

    def __init__(
        self,
        config: TransferConfig,
        layout: KvLayout,
        pools: Sequence[KvMemory],
        instance_id: str,
        epoch: str,
        others: OtherRanks | None = None,
    ) -> None:
        ranks = range(len(pools), layout.tp_size)
        assert len(ranks) == len(others.order_channels if others else ()), "one pool per rank"
        self.layout = replace(layout, checksum=checksum_name(pools[0].memory, config.verify))
        self._config = config
        self.pool = pools[0]
        self._instance_id = instance_id
        self._epoch = epoch
        own = [
            TransferAgent(config, self.layout, pool, instance_id, epoch, rank)
            for rank, pool in enumerate(pools)
        ]
        self._first = own[0]
        self._agents: list[RankAgent] = [*own]
        if others is not None:
            where = others, instance_id, epoch
            self._agents += [FarAgent(config, self.layout, *where, rank) for rank in ranks]
        self.links: dict[str, Link] = {}  # by the peer's instance
        self._meeting: dict[str, asyncio.Lock] = {}
        self._measuring = asyncio.Lock()
        self._expected_bytes_per_s = 0.0  # of a link between such pools; 0: not measured yet

    async def start(self, on_notification: Callable[[int, bytes], None]) -> None:
        """Register the pools. `on_notification` gets the own rank and each incoming message."""
        for rank, agent in enumerate(self._agents):
            await agent.start(partial(on_notification, rank))

    async def close(self) -> None:
        """Give everything back; transfers under way fail. Idempotent."""
        for agent in self._agents:
            await agent.close()

    def metadata(
        self, address: str = "", model: str = "", deployment: str = ""
    ) -> TransferMetadata:
        """Return the data with which peers can reach the pools; complete after `start`.

        `address` is the worker's on the request plane, where it answers claims.
        """
        return TransferMetadata(
            instance_id=self._instance_id,
            epoch=self._epoch,
            layout_hash=self.layout.digest(),
            layout=self.layout.describe(),
            transport=self._config.backend,
            memory=self.pool.memory,
            block_bytes=self.pool.block_bytes,
            num_blocks=self.pool.num_blocks,
            num_spare_blocks=self.pool.num_spare_blocks,
            ranks=[agent.metadata() for agent in self._agents],
            address=address,
            model=model,
            deployment=deployment,
        )

    def reports(self) -> list[LinkReport]:
        """Return a report of every link that was measured."""
        layout = self.layout
        found = []
        for link in self.links.values():
            if (rates := link.rates) is None:
                continue
            num_blocks = rates.min_streaming_blocks(
                layout.block_bytes, layout.num_layers, layout.num_groups
            )
            found.append(
                LinkReport(
                    decode_instance=link.peer.instance_id,
                    transport=self._config.backend,
                    memory=self.pool.memory,
                    write_bytes_per_s=rates.wire_bytes_per_s * self.byte_scale,
                    overhead_us=rates.overhead_s * 1e6,
                    min_streaming_tokens=num_blocks and layout.num_tokens(num_blocks),
                    is_broken=link.is_broken,
                )
            )
        return found

    @property
    def s_per_byte(self) -> float | None:
        """The seconds of a byte over the slowest link that was measured; None before."""
        rates = [link.rates for link in self.links.values() if link.rates is not None]
        return max((each.s_per_byte for each in rates), default=None)

    @property
    def longest_write_s(self) -> float:
        """The longest recent write of any rank; the margin of a lease is at least as long."""
        return max(agent.longest_write_s for agent in self._agents)

    def expect(self, change: int) -> None:
        """Count one more (+1) or one less (-1) handoff; 0: KV is about to arrive."""
        for agent in self._agents:
            agent.expect(change)

    async def connect(self, peer: TransferMetadata) -> Link:
        """Make `peer` reachable and ready for transfers; idempotent per epoch, drops older epochs.

        The layouts are compared before any other metadata of the peer is decoded.
        """
        if (usable := self._usable_link(peer)) is not None:
            return usable
        layout = self._checked_layout(peer)
        async with self._meeting.setdefault(peer.instance_id, asyncio.Lock()):
            if (usable := self._usable_link(peer)) is not None:
                return usable
            known = self.links.get(peer.instance_id)
            tp_size = self.layout.tp_size
            link = Link(
                peer, layout, layout.rank_pairs_from(tp_size), layout.read_pairs_from(tp_size)
            )
            for ranks in dict.fromkeys(link.rank_pairs + link.read_pairs):
                await self._connect_rank(link, ranks)
            if known is not None and known.peer == peer:
                link.rates = known.rates
            self.links[peer.instance_id] = link
            return link

    def _usable_link(self, peer: TransferMetadata) -> Link | None:
        link = self.links.get(peer.instance_id)
        return link if link is not None and link.peer == peer and not link.is_broken else None

    async def _connect_rank(self, link: Link, ranks: RankPair) -> None:
        agent, peer = self._agents[ranks.prefill_rank], link.peer
        rank = peer.ranks[ranks.decode_rank]
        grid = BlockGrid(
            rank.base_address,
            peer.block_bytes,
            peer.num_blocks + peer.num_spare_blocks,
            peer.memory,
            rank.device_id,
        )
        await agent.connect(link.peer_rank(ranks), rank.agent_metadata, grid)
        whole = self._selection(link, ranks, range(self.layout.num_layers), ())
        await agent.prepare(link.peer_rank(ranks), whole)

    async def prepare(self, link: Link, boundaries: Sequence[int]) -> None:
        """Make the descriptors of groups of layers that end at `boundaries`, before any write."""
        for ranks in link.rank_pairs:
            selection = self._selection(link, ranks, range(boundaries[0]), boundaries)
            await self._agents[ranks.prefill_rank].prepare(link.peer_rank(ranks), selection)

    async def measure(self, link: Link) -> None:
        """Warm the link up and measure `link.rates` between the spare blocks of both ends.

        Warn if the link is far slower than its kind of memory allows. Other transfers may go on.
        """
        spare = _SpareLink(self, link)
        if spare.num_blocks < 2:
            return
        link.rates = rates = await self.rates_between(spare, link)
        current = self.links.get(link.peer.instance_id)
        if current is not None and current.peer == link.peer:
            current.rates = rates  # it may have been connected again meanwhile

    async def rates_between(self, spare: SpareLink, link: Link) -> LinkRates:
        """Return the rates between spare blocks, by some transfers."""
        async with self._measuring:  # else the measurements would disturb each other
            rates = await measure(spare, self.pool.memory)
        name = f"{self._instance_id} to {link.peer.instance_id}"
        logger.info("KV from %s: %.2f GB/s", name, rates.wire_bytes_per_s / 1e9)
        num_bytes = spare.num_blocks * spare.block_bytes
        if num_bytes >= MIN_JUDGED_BYTES:
            # Once: each thread that allocates as many bytes keeps them.
            self._expected_bytes_per_s = self._expected_bytes_per_s or await asyncio.to_thread(
                expected_bytes_per_s, self.pool, num_bytes
            )
            if complaint := complaint_about(
                name, rates, self.pool.memory, self._expected_bytes_per_s, os.environ
            ):
                logger.warning(complaint)
        return rates

    async def disconnect(self, peer_instance: str) -> None:
        """Tear the connections down; transfers under way fail. Unknown peers are fine."""
        self.links.pop(peer_instance, None)
        self._meeting.pop(peer_instance, None)
        for agent in self._agents:
            await agent.disconnect(peer_instance)

    async def write(self, link: Link, order: WriteOrder) -> bytes:
        """Checksum and write blocks; return the notice once all of it is in the peer's memory."""
        ranks, layers = order.ranks, order.layers
        parts = self.layout.span_parts(ranks.prefill_heads, layers)
        with link.breaks():
            return await self._agents[ranks.prefill_rank].transfer(
                "WRITE",
                link.peer_rank(ranks),
                self._selection(link, ranks, layers, order.boundaries),
                order.blocks,
                order.make_notice,
                checked=parts if order.checked else None,
                after=order.after,
                post_before=order.post_before,
            )

    async def read(
        self, link: Link, ranks: RankPair, pairs: Sequence[tuple[int, int]]
    ) -> list[int]:
        """READ whole blocks, `pairs` of (local, remote) ids, and return their checksums."""
        agent, layers = self._agents[ranks.prefill_rank], range(self.layout.num_layers)
        selection = self._selection(link, ranks, layers, ())
        with link.breaks():
            await agent.transfer("READ", link.peer_rank(ranks), selection, pairs)
        return await self.prefill_checksums(ranks, layers, [local for local, _ in pairs])

    async def checksums(
        self, ranks: RankPair, layers: range, block_ids: Sequence[int]
    ) -> list[int]:
        """Return checksums of own blocks: these layers, the decode worker's heads of `ranks`."""
        parts = self.layout.span_parts(ranks.decode_heads, layers)
        return await self._agents[ranks.decode_rank].checksums(block_ids, parts)

    async def prefill_checksums(
        self, ranks: RankPair, layers: range, block_ids: Sequence[int]
    ) -> list[int]:
        """Return checksums of own blocks: these layers, the prefill worker's heads of `ranks`."""
        parts = self.layout.span_parts(ranks.prefill_heads, layers)
        return await self._agents[ranks.prefill_rank].checksums(block_ids, parts)

    async def notify(self, peer_instance: str, data: bytes) -> None:
        """Send a message that belongs to no write, from the first rank to the peer's first."""
        await self._first.notify(peer_instance, data)

    def _checked_layout(self, peer: TransferMetadata) -> KvLayout:
        if (peer.layout_hash, peer.transport) != (self.layout.digest(), self._config.backend):
            raise TransferError(
                f"KV layouts differ: {self._instance_id} has [{self.layout.describe()} "
                f"{self._config.backend}], {peer.instance_id} has [{peer.layout} {peer.transport}]"
            )
        layout = replace(self.layout, tp_size=len(peer.ranks))
        if peer.block_bytes != layout.block_bytes or peer.num_blocks < 1:
            raise TransferError(
                f"{peer.instance_id} announces {peer.num_blocks} blocks of {peer.block_bytes} "
                f"bytes in each of {layout.tp_size} ranks, not {layout.block_bytes}"
            )
        return layout

    def _selection(
        self, link: Link, ranks: RankPair, layers: range, boundaries: Sequence[int]
    ) -> Selection:
        """Return the parts of both sides' blocks that hold these layers of `ranks`."""
        num_layers = self.layout.num_layers
        if self.layout.heads_per_rank == link.layout.heads_per_rank:
            ends = [num_layers] if len(layers) == num_layers else list(boundaries)
            parts = self.layout.layer_parts(ends)
            begin = ends.index(layers.start) + 1 if layers.start else 0
            return Selection(parts, parts, range(begin, ends.index(layers.stop) + 1))
        return Selection(
            self.layout.head_parts(ranks.prefill_heads),
            link.layout.head_parts(ranks.decode_heads),
            range(2 * layers.start, 2 * layers.stop),
        )


class _SpareLink:
    """Transfers between spare blocks, over the first pair of ranks of a link."""

    def __init__(self, group: TransferGroup, link: Link) -> None:
        self.num_blocks = min(group.pool.num_spare_blocks, link.peer.num_spare_blocks)
        self.num_layers = group.layout.num_layers
        self._group = group
        self._link = link
        self._ranks = link.rank_pairs[0]
        parts = group.layout.span_parts(self._ranks.prefill_heads, range(self.num_layers))
        self.block_bytes = sum(num_bytes for _, num_bytes in parts)  # of the shared heads
        ours, theirs = group.pool.num_blocks, link.peer.num_blocks
        self._pairs = [(ours + i, theirs + i) for i in range(self.num_blocks)]

    async def write(self, num_blocks: int, num_layers: int, *, checked: bool) -> None:
        layers, pairs = range(num_layers), self._pairs[:num_blocks]
        ends = (num_layers, self.num_layers)
        if checked:
            # the second time, as the peer would of its own blocks
            await self._group.prefill_checksums(self._ranks, layers, [ours for ours, _ in pairs])
        order = WriteOrder(
            self._ranks, layers, pairs, Notice(HELLO), boundaries=ends, checked=checked
        )
        await self._group.write(self._link, order)

    async def read(self, num_blocks: int) -> None:
        await self._group.read(self._link, self._ranks, self._pairs[:num_blocks])
