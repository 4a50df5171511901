"""From a pool tensor to the agents that serve it."""

from typing import Protocol

import torch

from tandem.transfer.agent import KvPoolView
from tandem.transfer.config import TransferConfig
from tandem.transfer.group import TransferGroup
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import Memory


class KvMemory(Protocol):
    """A KV pool as its owner describes it."""

    tensor: torch.Tensor  # [num_blocks + num_spare_blocks, num_layers, 2, heads, block_size, dim]
    base_address: int
    block_bytes: int
    num_blocks: int
    num_spare_blocks: int
    memory: Memory
    device_id: int


def layout_of(pool: torch.Tensor) -> KvLayout:
    """The layout that the shape and dtype of a pool say, of a worker of one rank."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    dtype = str(pool.dtype).removeprefix("torch.")
    return KvLayout(num_layers, num_kv_heads, block_size, head_dim, dtype)


def group_for(config: TransferConfig, kv: KvMemory, instance_id: str, epoch: str) -> TransferGroup:
    """The agent of a worker of one rank, not started, over the whole pool."""
    view = KvPoolView(
        kv.tensor,
        kv.base_address,
        kv.block_bytes,
        kv.num_blocks,
        kv.memory,
        kv.device_id,
        kv.num_spare_blocks,
    )
    return TransferGroup(config, layout_of(kv.tensor), [view], instance_id, epoch)
