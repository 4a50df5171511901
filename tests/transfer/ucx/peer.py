"""One UCX transport over a pool of zeros in a process of its own: `ucx_peer.py name blocks bytes`.

It writes its metadata and its pool's address first, then a line per notice, and ends with stdin.
"""

import json
import select
import sys

import numpy as np

from tandem.transfer.transport import BlockGrid
from tandem.transfer.ucx.transport import UcxTransport


def serve(name: str, num_blocks: int, block_bytes: int) -> None:
    pool = np.zeros((num_blocks, block_bytes), np.uint8)
    transport = UcxTransport(name)
    transport.register(BlockGrid(pool.ctypes.data, block_bytes, num_blocks, "DRAM", 0))
    tell([transport.metadata().hex(), pool.ctypes.data])
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _, notice in transport.notifications():
            tell(notice.hex())
    transport.close()


def tell(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
