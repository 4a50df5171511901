"""The transfer agents of a worker, one per rank, as one; and its links to other workers."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tandem.runtime.errors import TransferError
from tandem.runtime.messages import LinkReport, TransferMetadata
from tandem.transfer.agent import KvPoolView, TransferAgent
from tandem.transfer.checksum import checksum_name
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout, Stream, streams
from tandem.transfer.link import Link
from tandem.transfer.link_probe import (
    MIN_JUDGED_BYTES,
    complaint_about,
    expected_bytes_per_s,
    measure,
)
from tandem.transfer.reactor import HELLO, Selection
from tandem.transfer.transport import BlockGrid

if TYPE_CHECKING:
    from torch.cuda import Event

logger = logging.getLogger(__name__)


class TransferGroup:
    """Moves KV blocks between this worker's pools and those of its peers.

    Block ids are those of every rank: a worker's ranks hold their shares of a block at the same
    place. Failures are TransferErrors.
    """

    def __init__(
        self,
        config: TransferConfig,
        layout: KvLayout,
        pools: Sequence[KvPoolView],
        instance_id: str,
        epoch: str,
    ) -> None:
        assert len(pools) == layout.tp_size, "one pool per rank"
        self.layout = replace(layout, checksum=checksum_name(pools[0].memory, config.verify))
        self._config = config
        self.pool = pools[0]
        self._instance_id = instance_id
        self._epoch = epoch
        self._agents = tuple(
            TransferAgent(config, self.layout, pool, instance_id, epoch, rank)
            for rank, pool in enumerate(pools)
        )
        self._links: dict[str, Link] = {}
        self._meeting: dict[str, asyncio.Lock] = {}
        self._measuring = asyncio.Lock()

    async def start(self, on_notification: Callable[[int, bytes], None]) -> None:
        """Register the pools. `on_notification` gets our rank and each message that comes."""
        config = self._config
        if config.write_timeout_s * 1e3 > config.lease_margin_ms + config.grace_ms:
            logger.warning(
                "a write may take %g s, more than the quarantine waits for it: lease_margin_ms %d "
                "and grace_ms %d",
                config.write_timeout_s,
                config.lease_margin_ms,
                config.grace_ms,
            )
        for rank, agent in enumerate(self._agents):
            await agent.start(partial(on_notification, rank))

    async def close(self) -> None:
        """Give everything back; transfers under way fail. Idempotent."""
        for agent in self._agents:
            await agent.close()

    def metadata(self) -> TransferMetadata:
        """What peers need to reach the pools; complete after `start`."""
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
        )

    @property
    def links(self) -> Mapping[str, Link]:
        """Instance |-> what is known of the way to it."""
        return self._links

    def reports(self) -> list[LinkReport]:
        """Every link that was measured."""
        layout = self.layout
        found = []
        for link in self._links.values():
            if (rates := link.rates) is None:
                continue
            num_blocks = rates.min_streaming_blocks(layout.block_bytes, layout.num_layers)
            found.append(
                LinkReport(
                    decode_instance=link.peer.instance_id,
                    transport=self._config.backend,
                    memory=self.pool.memory,
                    write_bytes_per_s=rates.wire_bytes_per_s,
                    read_bytes_per_s=1 / rates.read_s_per_byte,
                    overhead_us=rates.overhead_s * 1e6,
                    min_streaming_tokens=num_blocks and num_blocks * layout.block_size,
                    is_broken=link.is_broken,
                )
            )
        return found

    @property
    def longest_write_s(self) -> float:
        """The longest recent write of any rank; a lease's margin is at least this."""
        return max(agent.longest_write_s for agent in self._agents)

    def expect(self, change: int) -> None:
        """One more (+1) or one less (-1) handoff under way; 0: one is about to arrive."""
        for agent in self._agents:
            agent.expect(change)

    async def connect(self, peer: TransferMetadata) -> Link:
        """Make `peer` reachable, ready for transfers; idempotent per epoch, dropping older ones.

        Layouts are compared before anything else of it is decoded.
        """
        known = self._links.get(peer.instance_id)
        if known is not None and known.peer == peer and not known.is_broken:
            return known
        layout = self._checked_layout(peer)
        async with self._meeting.setdefault(peer.instance_id, asyncio.Lock()):
            known = self._links.get(peer.instance_id)
            if known is not None and known.peer == peer and not known.is_broken:
                return known
            pairs = streams(layout.num_kv_heads, self.layout.tp_size, layout.tp_size)
            link = Link(peer, layout, pairs)
            for stream in pairs:
                await self._connect_rank(link, stream)
            if known is not None and known.peer == peer:
                link.rates = known.rates
            self._links[peer.instance_id] = link
            return link

    async def _connect_rank(self, link: Link, stream: Stream) -> None:
        agent, peer = self._agents[stream.prefill_rank], link.peer
        rank = peer.ranks[stream.decode_rank]
        grid = BlockGrid(
            rank.base_address,
            peer.block_bytes,
            peer.num_blocks + peer.num_spare_blocks,
            peer.memory,
            rank.device_id,
        )
        await agent.connect(link.rank(stream), rank.agent_metadata, grid)
        whole = self._selection(link, stream, range(self.layout.num_layers), ())
        await agent.prepare(link.rank(stream), whole)

    async def prepare(self, link: Link, boundaries: Sequence[int]) -> None:
        """Make the descriptors for groups of layers that end at `boundaries`, before any write."""
        for stream in link.streams:
            selection = self._selection(link, stream, range(boundaries[0]), boundaries)
            await self._agents[stream.prefill_rank].prepare(link.rank(stream), selection)

    async def measure(self, link: Link) -> None:
        """Warm the way up and find out `link.rates`, between the spare blocks of both ends.

        Warns when it is far below what its kind of memory gives. Other transfers may go on.
        """
        spare = _SpareLink(self, link)
        if spare.num_blocks < 2:
            return
        async with self._measuring:  # or each would measure the others too
            rates = await measure(spare, self.pool.memory)
        way = f"{self._instance_id} to {link.peer.instance_id}"
        logger.info("KV from %s: %.2f GB/s", way, rates.wire_bytes_per_s / 1e9)
        num_bytes = spare.num_blocks * spare.block_bytes
        if num_bytes >= MIN_JUDGED_BYTES:
            expected = await asyncio.to_thread(expected_bytes_per_s, self.pool.tensor, num_bytes)
            if complaint := complaint_about(way, rates, self.pool.memory, expected, os.environ):
                logger.warning(complaint)
        link.rates = rates
        current = self._links.get(link.peer.instance_id)
        if current is not None and current.peer == link.peer:
            current.rates = rates  # it may have been connected anew meanwhile

    async def disconnect(self, peer_instance: str) -> None:
        """Tear the connections down; transfers under way fail. Unknown peers are fine."""
        self._links.pop(peer_instance, None)
        self._meeting.pop(peer_instance, None)
        for agent in self._agents:
            await agent.disconnect(peer_instance)

    async def write(
        self,
        link: Link,
        stream: Stream,
        layers: range,
        pairs: Sequence[tuple[int, int]],
        make_notice: Callable[[Sequence[int]], bytes],
        *,
        boundaries: Sequence[int] = (),
        post_before: float | None = None,
        after: "Event | None" = None,
        checked: bool = True,
    ) -> bytes:
        """Checksum (if `checked`) and write these layers of blocks, `pairs` of (local, remote) ids.

        Returns the notice, `make_notice` of the checksums, once all is in the peer's memory. Whole
        blocks, or groups of layers that end at `boundaries`. `after`: when the data is there.
        """
        agent = self._agents[stream.prefill_rank]
        local_blocks = [local for local, _ in pairs]
        parts = self.layout.span_parts(stream.prefill_heads, layers)

        def notice() -> bytes:
            return make_notice(agent.checksums_now(local_blocks, parts, after) if checked else [])

        with _breaking(link):
            return await agent.transfer(
                "WRITE",
                link.rank(stream),
                self._selection(link, stream, layers, boundaries),
                pairs,
                notice,
                post_before=post_before,
            )

    async def read(self, link: Link, stream: Stream, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """READ whole blocks of a decode worker, `pairs` of (local, remote) ids; their checksums."""
        agent, layers = self._agents[stream.prefill_rank], range(self.layout.num_layers)
        selection = self._selection(link, stream, layers, ())
        with _breaking(link):
            await agent.transfer("READ", link.rank(stream), selection, pairs)
        return await self.prefill_checksums(stream, layers, [local for local, _ in pairs])

    async def checksums(self, stream: Stream, layers: range, block_ids: Sequence[int]) -> list[int]:
        """As the decode worker of `stream`: what its heads of these layers of our blocks hold."""
        parts = self.layout.span_parts(stream.decode_heads, layers)
        return await self._agents[stream.decode_rank].checksums(block_ids, parts)

    async def prefill_checksums(
        self, stream: Stream, layers: range, block_ids: Sequence[int]
    ) -> list[int]:
        """As the prefill worker of `stream`: what its heads of these layers of our blocks hold."""
        parts = self.layout.span_parts(stream.prefill_heads, layers)
        return await self._agents[stream.prefill_rank].checksums(block_ids, parts)

    def streams_from(self, prefill_tp: int) -> tuple[Stream, ...]:
        """As a decode worker: what comes from a prefill worker of so many ranks."""
        return streams(self.layout.num_kv_heads, prefill_tp, self.layout.tp_size)

    async def notify(self, peer_instance: str, data: bytes) -> None:
        """Send a message that belongs to no write, from the first rank to the peer's first."""
        await self._agents[0].notify(peer_instance, data)

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
        self, link: Link, stream: Stream, layers: range, boundaries: Sequence[int]
    ) -> Selection:
        """How both sides cut their blocks so that these layers of the stream can go."""
        num_layers = self.layout.num_layers
        if self.layout.tp_size == link.layout.tp_size:
            ends = [num_layers] if len(layers) == num_layers else list(boundaries)
            parts = self.layout.layer_parts(ends)
            begin = ends.index(layers.start) + 1 if layers.start else 0
            return Selection(parts, parts, range(begin, ends.index(layers.stop) + 1))
        return Selection(
            self.layout.head_parts(stream.prefill_heads),
            link.layout.head_parts(stream.decode_heads),
            range(2 * layers.start, 2 * layers.stop),
        )


class _SpareLink:
    """Transfers over the first stream of a link, between spare blocks."""

    def __init__(self, group: TransferGroup, link: Link) -> None:
        self.num_blocks = min(group.pool.num_spare_blocks, link.peer.num_spare_blocks)
        self.num_layers = group.layout.num_layers
        self._group = group
        self._link = link
        self._stream = link.streams[0]
        parts = group.layout.span_parts(self._stream.prefill_heads, range(self.num_layers))
        self.block_bytes = sum(num_bytes for _, num_bytes in parts)  # a share, where widths differ
        ours, theirs = group.pool.num_blocks, link.peer.num_blocks
        self._pairs = [(ours + i, theirs + i) for i in range(self.num_blocks)]

    async def write(self, num_blocks: int, num_layers: int, *, checked: bool) -> None:
        layers, pairs = range(num_layers), self._pairs[:num_blocks]
        ends = (num_layers, self.num_layers)
        if checked:
            # twice, as the peer would for itself
            await self._group.prefill_checksums(self._stream, layers, [ours for ours, _ in pairs])
        await self._group.write(
            self._link,
            self._stream,
            layers,
            pairs,
            lambda _: HELLO,
            boundaries=ends,
            checked=checked,
        )

    async def read(self, num_blocks: int) -> None:
        await self._group.read(self._link, self._stream, self._pairs[:num_blocks])


@contextlib.contextmanager
def _breaking(link: Link) -> Iterator[None]:
    """A transfer that fails has taken the connection with it."""
    try:
        yield
    except TransferError:
        link.is_broken = True
        raise
