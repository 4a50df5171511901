"""Ranks of workers in a process of its own, each with its agent and pool; driven by JSON lines.

It says how to reach the ranks first, then a line for each message that one of them hears and one
for the answer to each command. Ranks are named "instance.rank". Only these lines are on stdout;
what libraries print there, as UCX does its log, goes to stderr.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from tandem.runtime.messages import RankMetadata, TransferMetadata
from tandem.transfer.agent import TransferAgent
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.landed import decode_landed, encode_landed
from tandem.transfer.layout import KvLayout, RankPair, rank_pairs
from tandem.transfer.reactor import PeerRank, Selection
from tandem.transfer.transport import BlockGrid
from tests.transfer.pools import make_pool

OUT = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)


class Setup(msgspec.Struct):
    """What to hold: (instance, epoch, tp_size, rank)."""

    ranks: list[tuple[str, str, int, int]]
    num_blocks: int
    num_spare_blocks: int
    fill: str
    layout: KvLayout


class Connect(msgspec.Struct, tag=True):
    """As a rank of a prefill worker: meet the ranks of a decode worker that share its heads."""

    rank: str
    peer: TransferMetadata


class Write(msgspec.Struct, tag=True):
    """As a rank of a prefill worker: (local, remote) blocks; the answer is the Landed sent."""

    rank: str
    peer: TransferMetadata
    decode_rank: int
    layers: tuple[int, int]
    boundaries: list[int]
    pairs: list[tuple[int, int]]
    landed: bytes  # its checksums are filled in here


class Checksums(msgspec.Struct, tag=True):
    """Of these heads and layers of blocks, as the rank counts its heads."""

    rank: str
    heads: tuple[int, int]
    layers: tuple[int, int]
    blocks: list[int]


class Contents(msgspec.Struct, tag=True):
    """The bytes of the rank's pool."""

    rank: str


class Rank:
    """One rank of a worker."""

    def __init__(self, setup: Setup, instance_id: str, epoch: str, tp_size: int, rank: int) -> None:
        self.name = f"{instance_id}.{rank}"
        self.rank = rank
        self.layout = replace(setup.layout, tp_size=tp_size)
        kv = make_pool(
            setup.num_blocks, self.layout, fill=setup.fill, num_spare_blocks=setup.num_spare_blocks
        )
        self.pool = kv.tensor
        self.agent = TransferAgent(TransferConfig(), self.layout, kv, instance_id, epoch, rank)

    async def start(self) -> RankMetadata:
        await self.agent.start(lambda data: tell(heard=self.name, data=data))
        self.agent.expect(+1)
        return self.agent.metadata()

    async def connect(self, peer: TransferMetadata) -> None:
        for ranks in self._rank_pairs(peer):
            rank = peer.ranks[ranks.decode_rank]
            address, device = rank.base_address, rank.device_id
            num_all = peer.num_blocks + peer.num_spare_blocks
            grid = BlockGrid(address, peer.block_bytes, num_all, peer.memory, device)
            name = PeerRank(peer.instance_id, peer.epoch, ranks.decode_rank)
            await self.agent.connect(name, rank.agent_metadata, grid)

    async def write(self, command: Write) -> bytes:
        peer, layers = command.peer, range(*command.layers)
        (ranks,) = [s for s in self._rank_pairs(peer) if s.decode_rank == command.decode_rank]
        parts = self.layout.span_parts(ranks.prefill_heads, layers)
        template = decode_landed(command.landed)
        assert template is not None

        def notice(sums: Sequence[int]) -> bytes:
            ordinals = [ordinal for ordinal, _ in template.blocks]
            return encode_landed(replace(template, blocks=tuple(zip(ordinals, sums, strict=True))))

        return await self.agent.transfer(
            "WRITE",
            PeerRank(peer.instance_id, peer.epoch, ranks.decode_rank),
            self._selection(peer, ranks, layers, command.boundaries),
            command.pairs,
            notice,
            checked=parts,
        )

    async def checksums(self, command: Checksums) -> list[int]:
        parts = self.layout.span_parts(range(*command.heads), range(*command.layers))
        return await self.agent.checksums(command.blocks, parts)

    def _rank_pairs(self, peer: TransferMetadata) -> list[RankPair]:
        pairs = rank_pairs(self.layout.num_kv_heads, self.layout.tp_size, len(peer.ranks))
        return [ranks for ranks in pairs if ranks.prefill_rank == self.rank]

    def _selection(
        self, peer: TransferMetadata, ranks: RankPair, layers: range, boundaries: list[int]
    ) -> Selection:
        theirs = replace(self.layout, tp_size=len(peer.ranks))
        if theirs.tp_size == self.layout.tp_size:
            parts = self.layout.layer_parts(boundaries)
            begin = boundaries.index(layers.start) + 1 if layers.start else 0
            return Selection(parts, parts, range(begin, boundaries.index(layers.stop) + 1))
        return Selection(
            self.layout.head_parts(ranks.prefill_heads),
            theirs.head_parts(ranks.decode_heads),
            range(2 * layers.start, 2 * layers.stop),
        )


def tell(**message: object) -> None:
    OUT.write(msgspec.json.encode(message) + b"\n")
    OUT.flush()


async def answer(ranks: dict[str, Rank], line: bytes) -> object:
    command = msgspec.json.decode(line, type=Connect | Write | Checksums | Contents)
    rank = ranks[command.rank]
    match command:
        case Connect(peer=peer):
            return await rank.connect(peer)
        case Write():
            return await rank.write(command)
        case Checksums():
            return await rank.checksums(command)
        case Contents():
            return rank.pool.view(-1).view(torch.uint8).numpy().tobytes()


async def serve(setup: Setup) -> None:
    ranks = [Rank(setup, *fields) for fields in setup.ranks]
    tell(answer={rank.name: await rank.start() for rank in ranks})
    by_name = {rank.name: rank for rank in ranks}
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        tell(answer=await answer(by_name, line))
    for rank in ranks:
        await rank.agent.close()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Setup)))
