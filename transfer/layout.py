"""The shape of a KV block, and the arithmetic of moving blocks between ranks.

A rank's pool is `[num_blocks, num_layers, 2, heads_per_rank, block_size, head_dim]`: one block is
one contiguous record over all layers of a group. A model has one group unless some of its layers
have a window. Of fewer KV heads than ranks, neighboring ranks have a replica each of the same head.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.dtypes import ELEMENT_BYTES
from tandem.transfer.transport import Parts

if TYPE_CHECKING:
    from tandem.transfer.transport import Pool

LAYOUT_VERSION = 2

ChecksumName = Literal["xxh3", "mix64", "none"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape on which two workers must agree before one writes into the other's memory.

    Only `tp_size`, the number of ranks that share the KV heads, may differ.
    """

    num_layers: int  # of a group, which has a block of its own
    num_kv_heads: int  # of the model, over all ranks
    block_size: int  # tokens
    head_dim: int
    dtype: str
    checksum: ChecksumName = "xxh3"
    tp_size: int = 1
    windows: tuple[int, ...] = (0,)  # of the groups of layers, in tokens; 0: none

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise TransferError(f"KV of dtype {self.dtype} can't be transferred")
        if not _are_even(self.num_kv_heads, self.tp_size):
            raise TransferError(
                f"{self.num_kv_heads} KV heads can't be divided evenly among {self.tp_size} ranks"
            )

    @classmethod
    def of(
        cls, pool: "Pool", num_kv_heads: int, tp_size: int = 1, windows: tuple[int, ...] = (0,)
    ) -> "KvLayout":
        """Return the layout of a worker of `tp_size` ranks from the pool of one of them.

        `pool` is `[num_blocks, num_layers, 2, heads of the rank, block_size, head_dim]`.
        """
        _, num_layers, _, num_heads, block_size, head_dim = pool.shape
        shape = num_layers, num_kv_heads, block_size, head_dim
        dtype = str(pool.dtype).removeprefix("torch.")
        layout = cls(*shape, dtype, tp_size=tp_size, windows=windows)
        assert num_heads == layout.heads_per_rank, (num_heads, layout)
        return layout

    @property
    def num_groups(self) -> int:
        """Groups of layers: a sequence has a block in each for every `block_size` tokens."""
        return len(self.windows)

    @property
    def token_bytes(self) -> float:
        """Bytes of a rank that each further token of a long prompt adds to a handoff."""
        return max(1, self.windows.count(0)) * self.block_bytes / self.block_size

    def num_tokens(self, num_blocks: int) -> int | None:
        """Return the fewest tokens, in whole blocks, of a handoff of `num_blocks`. None: no such.

        A group with a window adds no more blocks than a window touches.
        """
        limits = [-(-window // self.block_size) + 1 for window in self.windows if window]
        num_full = self.windows.count(0)

        def num_blocks_of(num_ordinals: int) -> int:
            return num_full * num_ordinals + sum(min(num_ordinals, limit) for limit in limits)

        found = bisect_left(range(num_blocks + 1), num_blocks, key=num_blocks_of)
        return found * self.block_size if found <= num_blocks else None

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys (or of its values) in one layer of one block."""
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
        """Return the layout in words, for error messages that name both sides' layouts."""
        windows = "" if self.windows == (0,) else f" windows={','.join(map(str, self.windows))}"
        return (
            f"v{LAYOUT_VERSION} layers={self.num_layers}{windows} kv_heads={self.num_kv_heads} "
            f"block_size={self.block_size} head_dim={self.head_dim} dtype={self.dtype} "
            f"checksum={self.checksum}"
        )

    def digest(self) -> str:
        """Return the compatibility hash, 32 hex characters.

        Two digests are equal if and only if blocks of one layout can be written into the other.
        """
        return blake2b(self.describe().encode(), digest_size=16).hexdigest()

    def layer_parts(self, boundaries: Sequence[int]) -> Parts:
        """Return a rank's whole block, cut after each layer count of `boundaries`."""
        begins = [0, *boundaries[:-1]]
        return tuple(
            (begin * self.layer_bytes, (end - begin) * self.layer_bytes)
            for begin, end in zip(begins, boundaries, strict=True)
        )

    def head_parts(self, heads: range) -> Parts:
        """Return these heads of a rank's block: per layer one piece of keys and one of values."""
        plane_bytes = self.layer_bytes // 2  # of a layer's keys, or values
        return tuple(
            (plane * plane_bytes + heads.start * self.head_bytes, len(heads) * self.head_bytes)
            for plane in range(2 * self.num_layers)
        )

    def span_parts(self, heads: range, layers: range) -> Parts:
        """Return the pieces of a rank's block that hold these heads of these layers."""
        if len(heads) == self.heads_per_rank:
            return ((layers.start * self.layer_bytes, len(layers) * self.layer_bytes),)
        return self.head_parts(heads)[2 * layers.start : 2 * layers.stop]

    def rank_pairs_from(self, prefill_tp: int) -> "tuple[RankPair, ...]":
        """Return the pairs over which a prefill worker of `prefill_tp` ranks writes into this."""
        return rank_pairs(self.num_kv_heads, prefill_tp, self.tp_size)

    def read_pairs_from(self, prefill_tp: int) -> "tuple[RankPair, ...]":
        """Return the pairs over which a prefill worker of `prefill_tp` ranks READs from this."""
        pairs = rank_pairs(self.num_kv_heads, self.tp_size, prefill_tp)
        return tuple(pair.reversed() for pair in pairs)


@dataclass(frozen=True, slots=True)
class RankPair:
    """One rank of a prefill worker, one of a decode worker, and KV heads that both have."""

    prefill_rank: int
    decode_rank: int
    prefill_heads: range  # within the pool of `prefill_rank`
    decode_heads: range  # within the pool of `decode_rank`

    def reversed(self) -> "RankPair":
        """Return the pair with the prefill and the decode worker in each other's place."""
        return RankPair(self.decode_rank, self.prefill_rank, self.decode_heads, self.prefill_heads)


@lru_cache  # every span that lands asks for them
def rank_pairs(num_kv_heads: int, prefill_tp: int, decode_tp: int) -> tuple[RankPair, ...]:
    """Return the pairs over which every rank of the decode worker gets each of its heads once.

    Every replica of a head is written from one replica at the prefill worker, whose replicas share
    that work. TransferError unless one width divides the other.
    """
    wide, narrow = max(prefill_tp, decode_tp), min(prefill_tp, decode_tp)
    evenly = _are_even(num_kv_heads, prefill_tp) and _are_even(num_kv_heads, decode_tp)
    if not evenly or wide % narrow:
        raise TransferError(
            f"{num_kv_heads} KV heads can't be moved from {prefill_tp} ranks to {decode_tp} ranks"
        )
    per_prefill, per_decode = (max(1, num_kv_heads // tp) for tp in (prefill_tp, decode_tp))
    prefill_replicas, decode_replicas = (
        max(1, tp // num_kv_heads) for tp in (prefill_tp, decode_tp)
    )
    num_heads = min(per_prefill, per_decode)  # of a pair
    found = []
    for decode_rank in range(decode_tp):
        share, replica = divmod(decode_rank, decode_replicas)
        source = replica * prefill_replicas // decode_replicas
        for decode_head in range(0, per_decode, num_heads):
            place, prefill_head = divmod(share * per_decode + decode_head, per_prefill)
            found.append(
                RankPair(
                    place * prefill_replicas + source,
                    decode_rank,
                    range(prefill_head, prefill_head + num_heads),
                    range(decode_head, decode_head + num_heads),
                )
            )
    return tuple(found)


def _are_even(num_kv_heads: int, tp_size: int) -> bool:
    """Return True if each rank has as many heads as any, and each head as many replicas."""
    return tp_size > 0 and 0 in (num_kv_heads % tp_size, tp_size % num_kv_heads)
