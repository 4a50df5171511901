"""A rank of a model: its share of the weights, and its products, whose results the ranks join."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import Shard, cut_unit
from tandem.engine.architecture.spec import Size
from tandem.engine.decoder.kernel_set import Kernels
from tandem.kernels.reference.experts import Experts, ExpertWeights
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import Matrix
from tandem.kernels.reference.segments import Multiply, Segments, pack_in_segments
from tandem.runtime.errors import ModelError


class Exchange(Protocol):
    """One rank's end of the exchanges, each of which all ranks make in the same order."""

    def add_up(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of all ranks' contiguous float32 parts, rounded once to `dtype`."""

    def join_columns(self, part: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Return the ranks' columns [starts[rank], starts[rank + 1]) side by side at rank 0."""

    def share_rows(self, rows: torch.Tensor, owners: torch.Tensor) -> None:
        """Fill every row of `rows` with that of the rank that owns it."""

    def waited_s(self) -> list[float]:
        """Return how long each rank has waited for the others, as far as that is known."""

    def end(self) -> None:
        """Let this rank's waiting calls, and all later ones, end."""


class Rank(Protocol):
    """One rank in its own process, as the runner of its model sees it."""

    shard: Shard
    draws_apart: bool  # the tokens that rank 0 draws go from device to device

    @property
    def exchange(self) -> Exchange:
        """The exchanges with the other ranks; after `ready`, where these hold no memory before."""

    @property
    def pool_config(self) -> ModelConfig:
        """The configuration that says the size of the pool that `allocate` makes."""

    @property
    def allocate(self) -> Callable[[int, int], torch.Tensor] | None:
        """The maker of the pool; None: memory of its own."""

    def ready(self) -> None:
        """Return once all ranks have their weights."""

    def own_heads(self, pool: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads of a pool, as a view."""

    def meet(self) -> None:
        """Let what follows begin once every rank's K/V, so far, is in a pool that all share."""

    def agree(self, num_blocks: int) -> int:
        """Return the KV blocks of all ranks, of which this one has memory for `num_blocks`."""

    def share(self, drawn: torch.Tensor) -> None:
        """Fill `drawn` with rank 0's, where `draws_apart`."""

    def end_waiting(self) -> None:
        """Let the exchanges end, whatever the other ranks do."""

    def close(self) -> None:
        """Give the exchanges' memory and connections back; no call is under way."""


def with_segments(kernels: Kernels, model: ModelConfig, num_segments: int) -> Kernels:
    """Return `kernels` for one process that adds up as several would, in `num_segments`."""
    if kernels.multiply_in_float32 is not None:
        return _with_segments_on_gpu(kernels, kernels.multiply_in_float32, model, num_segments)
    # Not at the top: it compiles the kernels.
    from tandem.kernels.cpu.experts import pack_experts
    from tandem.kernels.cpu.segments import SegmentedLinear

    def pack_output(weight: Matrix, in_size: Size) -> Linear:
        unit = cut_unit(model, in_size)
        segments = Segments(weight.shape[1], num_segments, 0, num_segments, unit)
        return SegmentedLinear(weight, segments)

    def pack(experts: ExpertWeights) -> Experts:
        unit = cut_unit(model, "expert_size")
        segments = Segments(model.expert_size, num_segments, 0, num_segments, unit)
        return pack_experts(experts, segments)

    return replace(kernels, pack_output=pack_output, pack_experts=pack)


def _with_segments_on_gpu(
    kernels: Kernels, multiply: Multiply, model: ModelConfig, num_segments: int
) -> Kernels:
    def pack_output(weight: Matrix, in_size: Size) -> Linear:
        unit = cut_unit(model, in_size)
        segments = Segments(weight.shape[1], num_segments, 0, num_segments, unit)
        product = pack_in_segments(weight, segments, multiply)
        return lambda x: product(x).to(x.dtype)

    return replace(kernels, fused=None, pack_output=pack_output)


def of_rank(kernels: Kernels, rank: Rank, num_segments: int) -> Kernels:
    """Return `kernels` with the exchanges that a decoder of this rank's share needs."""
    return _RankKernels(kernels, rank, num_segments).kernels()


class _RankKernels:
    def __init__(self, kernels: Kernels, rank: Rank, num_segments: int) -> None:
        self._kernels, self._rank, self._shard = kernels, rank, rank.shard
        self._num_segments = num_segments

    def kernels(self) -> Kernels:
        return replace(
            self._kernels,
            embed=self._embed,
            fused=None,  # these add a part to the residual stream, before it is a sum
            pack_output=self._pack_output,
            pack_experts=self._pack_experts,
            pack_head=self._pack_head,
            pack_rows=self._pack_rows,
        )

    def _pack_output(self, weight: Matrix, in_size: Size) -> Linear:
        product, rank = self._pack_part(weight, self._segments(in_size)), self._rank
        return lambda x: rank.exchange.add_up(product(x), x.dtype)

    def _pack_part(self, weight: Matrix, segments: Segments) -> Linear:
        multiply = self._kernels.multiply_in_float32
        if multiply is not None:
            return pack_in_segments(weight, segments, multiply)
        from tandem.kernels.cpu.segments import SegmentedLinear

        return SegmentedLinear(weight, segments, torch.float32)

    def _pack_experts(self, experts: ExpertWeights) -> Experts:
        if self._kernels.pack_experts_in_float32 is not None:
            if self._shard.index:
                experts = replace(experts, down_bias=None)  # rank 0 adds it
            parts, rank = self._kernels.pack_experts_in_float32(experts), self._rank
            return lambda x, *choices: rank.exchange.add_up(parts(x, *choices), x.dtype)
        forms = {isinstance(part, torch.Tensor) for part in (experts.gate_up, experts.down)}
        if len(forms) > 1:
            raise ModelError(
                "experts of which a part is quantized are computed by one process (tp 1)"
            )
        from tandem.kernels.cpu.experts import pack_experts

        add_up = partial(self._rank.exchange.add_up, dtype=torch.float32)
        return pack_experts(experts, self._segments("expert_size"), add_up)

    def _segments(self, in_size: Size) -> Segments:
        shard = self._shard
        model, count = shard.whole, self._num_segments // shard.size
        where = self._num_segments, shard.index * count, count, cut_unit(model, in_size)
        return Segments(getattr(model, in_size), *where)

    def _pack_rows(self, weight: Matrix, out_size: Size) -> Linear:
        pack_share = self._kernels.pack_share
        if pack_share is None:
            return self._kernels.pack_linear(weight)
        num_rows: int = getattr(self._shard.whole, out_size)
        return pack_share(weight, num_rows)

    def _pack_head(self, weight: Matrix) -> Linear:
        linear, starts = self._pack_rows(weight, "vocab_size"), self._shard.vocab_starts
        rank = self._rank
        return lambda hidden: rank.exchange.join_columns(linear(hidden), starts)

    def _embed(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        table: torch.Tensor,  # [tokens of this rank, hidden_size]
        out: torch.Tensor,  # [num_tokens, hidden_size]
    ) -> None:
        _, *others, _ = starts = self._shard.vocab_starts
        owners = torch.zeros_like(token_ids)
        for start in others:
            owners += token_ids >= start
        mine = (token_ids - starts[self._shard.index]).clamp_(0, len(table) - 1)
        self._kernels.embed(mine, table, out)
        self._rank.exchange.share_rows(out, owners)
