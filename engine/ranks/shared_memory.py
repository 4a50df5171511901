"""Ranks of one machine's CPUs: their exchanges, and one KV pool, in memory that all share."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import Shard
from tandem.kernels.cpu.ranks import BUFFER_BYTES, LINE_BYTES, RankExchange, shared_bytes

# The longest that a rank waits for another within a step, which is one product of one layer.
PATIENCE_S = 60.0
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Open files without names: memory of all ranks, which ends with the last of them."""

    exchange: int  # file descriptors
    pool: int

    @classmethod
    def create(cls, model: ModelConfig, size: int) -> "SharedFiles":
        """Create the files of a model of `size` ranks."""
        exchange = os.memfd_create("tandem-ranks")
        os.ftruncate(exchange, shared_bytes(size, _buffer_bytes(model, size)))
        return cls(exchange, os.memfd_create("tandem-kv"))

    def close(self) -> None:
        os.close(self.exchange)
        os.close(self.pool)


class SharedRank:
    """A Rank of CPUs; `wait` returns once all ranks have their weights."""

    draws_apart = False

    def __init__(
        self, shard: Shard, files: SharedFiles, leader_pid: int, wait: Callable[[], None]
    ) -> None:
        self.shard = shard
        self.ready = wait
        self._pool_file = files.pool
        size, buffer_bytes = shard.size, _buffer_bytes(shard.whole, shard.size)
        memory = mmap.mmap(files.exchange, shared_bytes(size, buffer_bytes))
        where = memory, shard.index, size, buffer_bytes
        self.exchange = RankExchange(*where, leader_pid, PATIENCE_S)

    @property
    def pool_config(self) -> ModelConfig:
        return self.shard.whole

    def allocate(self, num_bytes: int, _device_id: int) -> torch.Tensor:
        """Return the pool of all ranks, as bytes: a block has the layout of a single process."""
        os.ftruncate(self._pool_file, num_bytes)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return torch.frombuffer(mmap.mmap(self._pool_file, num_bytes, flags), dtype=torch.uint8)

    def own_heads(
        self,
        pool: torch.Tensor,  # [num_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
    ) -> torch.Tensor:
        """Return this rank's heads of a pool, as a view.

        Ranks that share a head store the same bytes, each before it reads them.
        """
        heads = self.shard.kv_heads
        return pool[:, :, :, heads.start : heads.stop]

    def meet(self) -> None:
        self.exchange.meet()

    def agree(self, num_blocks: int) -> int:
        """Return the number: all ranks derive it from one configuration."""
        return num_blocks

    def share(self, drawn: torch.Tensor) -> None:
        """Do nothing: each step's message has its tokens."""

    def end_waiting(self) -> None:
        self.exchange.end()

    def close(self) -> None:
        """Do nothing: the memory ends with the last of its processes."""


def _buffer_bytes(model: ModelConfig, size: int) -> int:
    """Return a size that holds a row of a rank's logits, and one of hidden states, in float32."""
    widest = max(model.vocab_size // size + 16, model.hidden_size) * FLOAT_BYTES
    return max(BUFFER_BYTES, -(-widest // LINE_BYTES) * LINE_BYTES)
