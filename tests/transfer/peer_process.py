"""A decode worker's side of transfers in a process of its own, driven by JSON lines.

Its pool starts as zeros. It writes its metadata first, then a line for each notification, and
answers {"sum": [block ids]} with the blocks' checksums.
"""

import asyncio
import base64
import json
import sys

import msgspec
import torch

from tandem.transfer.agent import KvPoolView, TransferAgent
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout


def tell(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def serve(instance_id: str, epoch: str, num_blocks: int, layout: KvLayout) -> None:
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size)
    tensor = torch.zeros(*shape, layout.head_dim, dtype=getattr(torch, layout.dtype))
    kv = KvPoolView(tensor, tensor.data_ptr(), layout.block_bytes, num_blocks, "DRAM", 0)
    agent = TransferAgent(TransferConfig(), layout, kv, instance_id, epoch)
    await agent.start(lambda data: tell(notification=base64.b64encode(data).decode()))
    agent.expect(+1)
    tell(metadata=base64.b64encode(msgspec.msgpack.encode(agent.metadata())).decode())
    while line := await asyncio.to_thread(sys.stdin.readline):
        tell(sums=await agent.checksums(json.loads(line)["sum"]))
    await agent.close()


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    asyncio.run(
        serve(fields["id"], fields["epoch"], fields["num_blocks"], KvLayout(**fields["layout"]))
    )
