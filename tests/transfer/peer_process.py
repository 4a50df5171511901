"""A worker of one rank in a process of its own: `INSTANCE EPOCH NUM_SPARE_BLOCKS`.

It says how to reach it first, then a line for each message that it hears and one with the checksums
of each list of blocks that it reads, all in JSON. Only these lines are on stdout; what libraries
print there, as UCX does its log, goes to stderr.
"""

import asyncio
import os
import sys

import msgspec

from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.config import TransferConfig
from tests.transfer.pools import LAYOUT, make_pool

OUT = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)


def tell(**message: object) -> None:
    OUT.write(msgspec.json.encode(message) + b"\n")
    OUT.flush()


async def serve(instance_id: str, epoch: str, num_spare_blocks: int) -> None:
    pool = make_pool(64, LAYOUT, fill="zero", num_spare_blocks=num_spare_blocks)
    group = TransferGroup(TransferConfig(), LAYOUT, [pool], instance_id, epoch)
    await group.start(lambda rank, data: tell(heard=data))
    group.expect(+1)
    tell(answer=group.metadata())
    (ranks,) = group.layout.rank_pairs_from(1)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        block_ids = msgspec.json.decode(line, type=list[int])
        tell(answer=await group.checksums(ranks, range(LAYOUT.num_layers), block_ids))
    await group.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
