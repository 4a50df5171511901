"""The descriptors of a long prompt's handoff, and the time to prepare its writes."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from tandem.bench.handoff.end import DEADLINE_S, PoolShape
from tandem.bench.handoff.peer import Expect, Receive
from tandem.bench.handoff.wire import Pairs, Wire
from tandem.engine.schedule.block_pool import BlockPool
from tandem.runtime.errors import TransferError
from tandem.transfer.nixl import NixlTransport
from tandem.transfer.reactor import HELLO, PeerRank, Selection, TransferOrder, TransferReactor
from tandem.transfer.transport import BlockGrid

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512  # 8k tokens
POOL_BLOCKS = 4096
# Blocks so small that a write's post takes hardly any time: preparing is the rest.
TINY = PoolShape(num_blocks=PROMPT_BLOCKS, num_layers=1, num_kv_heads=1, head_dim=1)


@dataclass(slots=True)
class UsedPool:
    """A worker's pool, full of blocks that sequences of all lengths hold or left cached."""

    seed: int
    growth: float  # blocks that each sequence gains between two arrivals: decoding does that
    pool: BlockPool = field(default_factory=lambda: BlockPool(POOL_BLOCKS, BLOCK_TOKENS))
    _tables: list[list[int]] = field(default_factory=list)

    def prompts(self, num_steps: int) -> Iterator[list[int]]:
        """Yield the blocks that a long prompt gets, every fourth step, once the pool is full."""
        draw, hashes = random.Random(self.seed), (n.to_bytes(8, "little") for n in count())
        for step in range(num_steps):
            for table in self._tables:
                if draw.random() < self.growth and self.pool.num_available:
                    table += self._allocate(1, hashes, after=table[-1])
            num_blocks = int(2 ** draw.uniform(2, 9))
            self._make_room(num_blocks, draw)
            self._tables.append(self._allocate(num_blocks, hashes))
            if step > num_steps // 3 and step % 4 == 0:
                self._make_room(PROMPT_BLOCKS, draw)
                prompt = self._allocate(PROMPT_BLOCKS, hashes)
                yield prompt
                self.pool.free(prompt)

    def _make_room(self, num_blocks: int, draw: random.Random) -> None:
        pool = self.pool
        while pool.num_held + num_blocks > draw.uniform(0.6, 0.9) * POOL_BLOCKS and self._tables:
            pool.free(self._tables.pop(draw.randrange(len(self._tables))))

    def _allocate(
        self, num_blocks: int, hashes: Iterator[bytes], after: int | None = None
    ) -> list[int]:
        block_ids = self.pool.allocate(num_blocks, after)
        assert block_ids is not None
        for block_id in block_ids:
            self.pool.publish(block_id, next(hashes))
        return block_ids


def num_runs(pairs: Pairs) -> int:
    """Return the number of runs of (local, remote) blocks that are adjacent on both sides."""
    return sum(
        (local - 1, remote - 1) != before
        for (local, remote), before in zip(pairs, [None, *pairs], strict=False)
    )


def fresh_descriptors() -> int:
    """Return the number of descriptors of a long prompt between two unused pools."""
    pools = [BlockPool(POOL_BLOCKS, BLOCK_TOKENS) for _ in range(2)]
    local, remote = (pool.allocate(PROMPT_BLOCKS) for pool in pools)
    assert local is not None and remote is not None
    return num_runs(list(zip(local, remote, strict=True)))


def used_descriptors(seed: int, num_steps: int) -> list[int]:
    """Return the number of descriptors of each long prompt between two workers' pools in use."""
    prefill, decode = UsedPool(seed, growth=0.0), UsedPool(seed + 1, growth=0.1)
    both = zip(prefill.prompts(num_steps), decode.prompts(num_steps), strict=True)
    return [num_runs(list(zip(*tables, strict=True))) for tables in both]


async def time_bare_posts(wire: Wire, pairs: Pairs, num_samples: int) -> list[float]:
    """Return the seconds of the library's own post of writes of the wire's tiny blocks."""
    bare = wire.end.bare
    assert bare is not None
    wire.peer.tell(Receive(b"write", num_samples))
    samples = [bare.write(pairs) for _ in range(num_samples)]
    await wire.peer.answer()
    return samples


async def time_posts(wire: Wire, pairs: Pairs, num_samples: int) -> list[float]:
    """Return the seconds that the post of a write of tiny blocks keeps the transfer thread.

    The library's own post is part of it; the descriptors were prepared before.
    """
    transport = NixlTransport("near.1.1")
    transport.register(_grid(wire))
    reactor = TransferReactor("near.1.1", transport, PROMPT_BLOCKS, DEADLINE_S)
    await wire.peer.ask(Expect(+1))  # the far end polls often: a write's end needs it
    try:
        peer = wire.link.peer
        rank = PeerRank(peer.instance_id, peer.epoch, 0)
        whole = ((0, wire.end.kv.block_bytes),)
        selection = Selection(whole, whole, range(1))
        (remote,) = peer.ranks
        grid = BlockGrid(
            remote.base_address, peer.block_bytes, peer.num_blocks, peer.memory, remote.device_id
        )
        reactor.connect(rank, remote.agent_metadata, grid)
        reactor.prepare(rank, selection)
        order = TransferOrder("WRITE", rank, selection, pairs, HELLO, None, _raise)
        return [_post(reactor, order) for _ in range(num_samples)]
    finally:
        reactor.close()
        await wire.peer.ask(Expect(-1))


def _post(reactor: TransferReactor, order: TransferOrder) -> float:
    started_at = time.perf_counter()
    reactor.post(order)
    took_s = time.perf_counter() - started_at
    while reactor.num_transfers:
        reactor.poll()
    return took_s


def _raise(error: TransferError | None) -> None:
    if error is not None:
        raise error


def _grid(wire: Wire) -> BlockGrid:
    kv = wire.end.kv
    return BlockGrid(kv.base_address, kv.block_bytes, kv.num_blocks, kv.memory, kv.device_id)
