"""A rank of a model: its share of the weights, and its products, whose results the ranks join."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import Shard, cut_unit
from tandem.engine.architecture.spec import Size
from tandem.engine.decoder.kernel_set import Kernels
from tandem.kernels.cpu.experts import pack_experts
from tandem.kernels.cpu.linear import pack_linear
from tandem.kernels.cpu.ranks import BUFFER_BYTES, LINE_BYTES, RankExchange, shared_bytes
from tandem.kernels.cpu.segments import SegmentedLinear, Segments
from tandem.kernels.reference.experts import Experts, ExpertWeights
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import Matrix
from tandem.runtime.errors import ModelError

# The longest that a rank waits for another within a step, which is one product of one layer.
PATIENCE_S = 60.0
FLOAT_BYTES = 4


def with_segments(kernels: Kernels, model: ModelConfig, num_segments: int) -> Kernels:
    """Return `kernels` for one process that adds up as several would, in `num_segments`."""

    def pack_output(weight: Matrix, in_size: Size) -> Linear:
        unit = cut_unit(model, in_size)
        segments = Segments(weight.shape[1], num_segments, 0, num_segments, unit)
        return SegmentedLinear(weight, segments)

    def pack(experts: ExpertWeights) -> Experts:
        unit = cut_unit(model, "expert_size")
        segments = Segments(model.expert_size, num_segments, 0, num_segments, unit)
        return pack_experts(experts, segments)

    return replace(kernels, pack_output=pack_output, pack_experts=pack)


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


class Rank:
    """One rank in its own process; `ready` returns once all ranks have their weights."""

    def __init__(
        self,
        model: ModelConfig,
        size: int,
        index: int,
        num_segments: int,
        files: SharedFiles,
        leader_pid: int,
        ready: Callable[[], None],
    ) -> None:
        self.shard = Shard(model, size, index)
        self.ready = ready
        self._num_segments = num_segments
        self._pool_file = files.pool
        buffer_bytes = _buffer_bytes(model, size)
        memory = mmap.mmap(files.exchange, shared_bytes(size, buffer_bytes))
        where = memory, index, size, buffer_bytes
        self.exchange = RankExchange(*where, leader_pid, PATIENCE_S)

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

    def kernels(self, kernels: Kernels) -> Kernels:
        """Return `kernels` with the exchanges that a decoder of this rank's share needs."""
        return replace(
            kernels,
            embed=partial(self._embed, kernels.embed),
            pack_output=self._pack_output,
            pack_experts=self._pack_experts,
            pack_head=self._pack_head,
        )

    def _pack_output(self, weight: Matrix, in_size: Size) -> Linear:
        product = SegmentedLinear(weight, self._segments(in_size), torch.float32)
        return lambda x: self.exchange.add_up(product(x), x.dtype)

    def _pack_experts(self, experts: ExpertWeights) -> Experts:
        forms = {isinstance(part, torch.Tensor) for part in (experts.gate_up, experts.down)}
        if len(forms) > 1:
            raise ModelError(
                "experts of which a part is quantized are computed by one process (tp 1)"
            )
        add_up = partial(self.exchange.add_up, dtype=torch.float32)
        return pack_experts(experts, self._segments("expert_size"), add_up)

    def _segments(self, in_size: Size) -> Segments:
        model, count = self.shard.whole, self._num_segments // self.shard.size
        where = self._num_segments, self.shard.index * count, count, cut_unit(model, in_size)
        return Segments(getattr(model, in_size), *where)

    def _pack_head(self, weight: Matrix) -> Linear:
        linear, starts = pack_linear(weight), self.shard.vocab_starts
        return lambda hidden: self.exchange.join_columns(linear(hidden), starts)

    def _embed(
        self,
        embed: Callable[..., None],
        token_ids: torch.Tensor,  # [num_tokens]
        table: torch.Tensor,  # [tokens of this rank, hidden_size]
        out: torch.Tensor,  # [num_tokens, hidden_size]
    ) -> None:
        starts = torch.tensor(self.shard.vocab_starts)
        owners = torch.bucketize(token_ids, starts[1:-1], right=True)
        mine = (token_ids - starts[self.shard.index]).clamp_(0, len(table) - 1)
        embed(mine, table, out)
        self.exchange.share_rows(out, owners)


def _buffer_bytes(model: ModelConfig, size: int) -> int:
    """Return a size that holds a row of a rank's logits, and one of hidden states, in float32."""
    widest = max(model.vocab_size // size + 16, model.hidden_size) * FLOAT_BYTES
    return max(BUFFER_BYTES, -(-widest // LINE_BYTES) * LINE_BYTES)
