"""The shape of a KV block, and the arithmetic of moving blocks.

A pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: one block is one
contiguous record over all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from tandem.runtime.errors import TransferError

LAYOUT_VERSION = 1
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ChecksumName = Literal["xxh3", "mix64"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two workers must agree on before one writes into the other's memory."""

    num_layers: int
    num_kv_heads: int
    block_size: int  # tokens
    head_dim: int
    dtype: str
    checksum: ChecksumName = "xxh3"

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise TransferError(f"KV of dtype {self.dtype} can't be transferred")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values in one block."""
        elements = 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * ELEMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def describe(self) -> str:
        """The layout in words, for the error that names both sides'."""
        return (
            f"v{LAYOUT_VERSION} layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"block_size={self.block_size} head_dim={self.head_dim} dtype={self.dtype} "
            f"checksum={self.checksum}"
        )

    def digest(self) -> str:
        """Equal for equal layouts only; 32 hex characters."""
        return blake2b(self.describe().encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks that are adjacent, and in the same order, on both sides."""

    local_block: int
    remote_block: int
    count: int


def merge_adjacent(pairs: Sequence[tuple[int, int]]) -> list[Run]:
    """`(local block, remote block)` pairs as the fewest runs that keep their order."""
    runs: list[Run] = []
    for local, remote in pairs:
        last = runs[-1] if runs else None
        if last and (local, remote) == (
            last.local_block + last.count,
            last.remote_block + last.count,
        ):
            runs[-1] = Run(last.local_block, last.remote_block, last.count + 1)
        else:
            runs.append(Run(local, remote, 1))
    return runs
