"""A process with a KV cache: answers a JSON line with another, until its input ends."""

import os
import sys
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.sdk.nixl import NixlConnector

NUM_BLOCKS = 32
BLOCK_SHAPES = [(16, 2, 32), (16, 2, 8)]  # of the tensors: [block_size, num_heads, head_dim]


def caches() -> list[NDArray[np.float16]]:
    """Zeros."""
    return [np.zeros((NUM_BLOCKS, *shape), dtype=np.float16) for shape in BLOCK_SHAPES]


class Peer:
    def __init__(self, engine_id: str) -> None:
        self.caches = caches()
        self.connector = NixlConnector(engine_id)
        self.connector.register_kv_caches(self.caches)

    def metadata(self) -> tuple[bytes, bytes]:
        return self.connector.get_agent_metadata()

    def add(self, engine_id: str, metadata: bytes, descs: bytes) -> str:
        return self.connector.add_remote_agent(engine_id, metadata, descs)

    def fill(self, block_id: int, value: int) -> None:
        for cache in self.caches:
            cache[block_id] = value

    def write(self, local: list[int], remote: list[int], message: str) -> str:
        """Drop the handle at once."""
        return self.connector.write_blocks(local, remote, message).state

    def means(self) -> list[list[float]]:
        """[num_tensors, num_blocks]"""
        return [cache.mean(axis=(1, 2, 3)).tolist() for cache in self.caches]

    def notifs(self) -> dict[str, list[bytes]]:
        return self.connector.get_new_notifs()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # UCX writes its log to the standard output
    peer = Peer(sys.argv[1])
    for line in sys.stdin.buffer:
        name, arguments = msgspec.json.decode(line, type=tuple[str, list[Any]])
        if name == "add":  # bytes come as base64
            arguments = list(msgspec.convert(arguments, tuple[str, bytes, bytes]))
        answer = msgspec.json.encode(getattr(peer, name)(*arguments))
        answers.write(answer + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
