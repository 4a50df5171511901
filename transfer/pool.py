"""From a pool tensor to the agent that serves it."""

from typing import Protocol

import torch

from tandem.transfer.agent import KvPoolView, TransferAgent
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import Memory


class KvMemory(Protocol):
    """A KV pool as its owner describes it."""

    tensor: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    base_address: int
    block_bytes: int
    num_blocks: int
    memory: Memory
    device_id: int


def layout_of(pool: torch.Tensor) -> KvLayout:
    """The layout that a pool's shape and dtype say."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    dtype = str(pool.dtype).removeprefix("torch.")
    return KvLayout(num_layers, num_kv_heads, block_size, head_dim, dtype)


def agent_for(config: TransferConfig, kv: KvMemory, instance_id: str, epoch: str) -> TransferAgent:
    """An agent, not started, over the whole pool."""
    view = KvPoolView(
        kv.tensor, kv.base_address, kv.block_bytes, kv.num_blocks, kv.memory, kv.device_id
    )
    return TransferAgent(config, layout_of(kv.tensor), view, instance_id, epoch)
