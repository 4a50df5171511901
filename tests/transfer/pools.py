"""KV pools without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import Memory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype="bfloat16")


@dataclass(slots=True)
class Pool:
    """One rank's pool in host memory, a KvMemory."""

    tensor: torch.Tensor
    block_bytes: int
    num_blocks: int
    num_spare_blocks: int = 0
    base_address: int = field(init=False)
    memory: Memory = "DRAM"
    device_id: int = 0

    def __post_init__(self) -> None:
        self.base_address = self.tensor.data_ptr()


def make_pool(
    num_blocks: int, layout: KvLayout, *, fill: str = "random", num_spare_blocks: int = 0
) -> Pool:
    """Return a pool of zeros or, if `fill` is "random", of random bytes."""
    num_all = num_blocks + num_spare_blocks
    shape = (num_all, layout.num_layers, 2, layout.heads_per_rank, layout.block_size)
    tensor = torch.zeros(*shape, layout.head_dim, dtype=getattr(torch, layout.dtype))
    if fill == "random":
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return Pool(tensor, layout.block_bytes, num_blocks, num_spare_blocks)


def make_ranks(num_blocks: int, layout: KvLayout, *, fill: str = "random") -> list[Pool]:
    """Return the pools of all ranks, in which the replicas of a head are equal."""
    ranks = [make_pool(num_blocks, layout, fill=fill) for _ in range(layout.tp_size)]
    for rank, pool in enumerate(ranks):
        pool.tensor.copy_(ranks[rank - rank % _num_replicas(layout)].tensor)
    return ranks


def bits(pool: Pool) -> torch.Tensor:
    """Return the pool's tensor as integers: random floats may be no numbers."""
    return pool.tensor.view({2: torch.int16, 4: torch.int32}[pool.tensor.element_size()])


def joined(ranks: Sequence[Pool], layout: KvLayout) -> torch.Tensor:
    """Return all heads, once the replicas of each were seen to be equal, as integers.

    `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`
    """
    num_replicas = _num_replicas(layout)
    for rank, pool in enumerate(ranks):
        assert torch.equal(bits(pool), bits(ranks[rank - rank % num_replicas]))
    return torch.cat([bits(pool) for pool in ranks[::num_replicas]], dim=3)


def _num_replicas(layout: KvLayout) -> int:
    return max(1, layout.tp_size // layout.num_kv_heads)
