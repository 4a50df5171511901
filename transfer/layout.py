"""The shape of a KV block, and the arithmetic of moving blocks between ranks.

A rank's pool is `[num_blocks, num_layers, 2, num_kv_heads / tp_size, block_size, head_dim]`: one
block is one contiguous record over all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import Parts

LAYOUT_VERSION = 2
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ChecksumName = Literal["xxh3", "mix64", "none"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two workers must agree on before one writes into the other's memory.

    They may differ in `tp_size` alone, the number of ranks that the KV heads are dealt out to.
    """

    num_layers: int
    num_kv_heads: int  # of the model, over all ranks
    block_size: int  # tokens
    head_dim: int
    dtype: str
    checksum: ChecksumName = "xxh3"
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise TransferError(f"KV of dtype {self.dtype} can't be transferred")
        if self.tp_size < 1 or self.num_kv_heads % self.tp_size:
            raise TransferError(
                f"{self.num_kv_heads} KV heads can't be dealt out to {self.tp_size} ranks evenly"
            )

    @property
    def heads_per_rank(self) -> int:
        return self.num_kv_heads // self.tp_size

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys, or values, of one layer in one block."""
        return self.block_size * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values in one block of a rank."""
        return 2 * self.heads_per_rank * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of a rank."""
        return self.num_layers * self.layer_bytes

    def describe(self) -> str:
        """The layout in words, for the error that names both sides'."""
        return (
            f"v{LAYOUT_VERSION} layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"block_size={self.block_size} head_dim={self.head_dim} dtype={self.dtype} "
            f"checksum={self.checksum}"
        )

    def digest(self) -> str:
        """Equal for layouts that may be moved into one another only; 32 hex characters."""
        return blake2b(self.describe().encode(), digest_size=16).hexdigest()

    def layer_parts(self, boundaries: Sequence[int]) -> Parts:
        """A rank's whole block, cut behind each layer count of `boundaries`."""
        begins = [0, *boundaries[:-1]]
        return tuple(
            (begin * self.layer_bytes, (end - begin) * self.layer_bytes)
            for begin, end in zip(begins, boundaries, strict=True)
        )

    def head_parts(self, heads: range) -> Parts:
        """These heads of a rank's block: two pieces (keys, values) per layer, layer by layer."""
        plane_bytes = self.layer_bytes // 2  # of a layer's keys, or values
        return tuple(
            (plane * plane_bytes + heads.start * self.head_bytes, len(heads) * self.head_bytes)
            for plane in range(2 * self.num_layers)
        )

    def span_parts(self, heads: range, layers: range) -> Parts:
        """The pieces of a rank's block that these heads of these layers are."""
        if len(heads) == self.heads_per_rank:
            return ((layers.start * self.layer_bytes, len(layers) * self.layer_bytes),)
        return self.head_parts(heads)[2 * layers.start : 2 * layers.stop]


@dataclass(frozen=True, slots=True)
class Stream:
    """The KV heads that one rank of a prefill worker and one of a decode worker share."""

    prefill_rank: int
    decode_rank: int
    prefill_heads: range  # within the rank's pool
    decode_heads: range


def streams(num_kv_heads: int, prefill_tp: int, decode_tp: int) -> tuple[Stream, ...]:
    """Every pair of ranks with heads in common. One width must divide the other."""
    wide, narrow = max(prefill_tp, decode_tp), min(prefill_tp, decode_tp)
    if narrow < 1 or wide % narrow or num_kv_heads % wide:
        raise TransferError(
            f"{num_kv_heads} KV heads can't go from {prefill_tp} ranks to {decode_tp}"
        )
    num_heads = num_kv_heads // wide  # that a pair shares
    found = []
    for first in range(0, num_kv_heads, num_heads):
        prefill_rank, prefill_head = divmod(first, num_kv_heads // prefill_tp)
        decode_rank, decode_head = divmod(first, num_kv_heads // decode_tp)
        found.append(
            Stream(
                prefill_rank,
                decode_rank,
                range(prefill_head, prefill_head + num_heads),
                range(decode_head, decode_head + num_heads),
            )
        )
    return tuple(found)


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
