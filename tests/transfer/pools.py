"""KV pools without an engine."""

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
