"""What steps have to know of the running sequences, by seat, on the device.

The host sends what changed and nothing else: blocks that were added, a sequence that took a seat.
A step leaves here the tokens it draws, so that the next one need not wait for the host to learn
them.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tandem.engine.schedule.sequence import Sequence
from tandem.engine.step.upload import upload
from tandem.kernels.sampling.rows import SamplingRows

# What the owner of a seat asks of sampling beyond the likeliest token.
DRAWS = 1
ADJUSTS = 2
WANTS_LOGPROBS = 4


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class SeatChanges:
    """What the device doesn't know yet, column by column."""

    places: "array[int]" = field(default_factory=_column)  # in block_tables, flat
    block_ids: "array[int]" = field(default_factory=_column)  # there
    taken_seats: "array[int]" = field(default_factory=_column)  # of another sequence
    top_ks: "array[int]" = field(default_factory=_column)
    seeds: "array[int]" = field(default_factory=_column)
    reals: "array[float]" = field(default_factory=lambda: array("d"))  # 3 of each taken seat


class Seats:
    """`max_num_seqs` seats, and one behind them that is nobody's, for rows of padding.

    A sequence owns its seat from the first step with it to the first step of the seat's next
    owner. Steps must run on the device in the order in which their changes were taken.
    `pads_tables`: the kernels read blocks past a context, multiply them by zero, and must find
    nothing there that isn't finite.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        *,
        pads_tables: bool = False,
    ) -> None:
        num_seats = max_num_seqs + 1
        self.padding_seat = max_num_seqs
        self.max_blocks = max_blocks
        self.device = device
        self.pads_tables = pads_tables
        # [num_seats, max_blocks] past a sequence's blocks, anything
        self.block_tables = torch.zeros(num_seats, max_blocks, dtype=torch.int64, device=device)
        self.flat_tables = self.block_tables.view(-1)
        self.ordinals = torch.arange(num_seats, device=device)
        # [num_seats] the last token drawn, NO_TOKEN if that failed
        self.drawn = torch.zeros(num_seats, dtype=torch.int64, device=device)
        # [num_seats] each: a column that is gathered alone starts where Triton expects it to.
        self._temperatures, self._top_ps, self._min_ps = torch.zeros(3, num_seats, device=device)
        self._top_ks, self._seeds = torch.zeros(2, num_seats, dtype=torch.int64, device=device)
        self._needs = bytearray(num_seats)
        # What the device was sent. The lists themselves are kept: a freed one's id comes back.
        self._tables: list[list[int]] = [[] for _ in range(num_seats)]
        self._num_blocks = [0] * num_seats
        self._owners: list[Sequence | None] = [None] * num_seats

    def take_changes(self, seqs: list[Sequence]) -> SeatChanges | None:
        """What the device must be told before a step of `seqs`; from then on it counts as told.

        A sequence's `block_table` is one list that only grows, or another list.
        """
        tables, num_blocks = self._tables, self._num_blocks
        changed = [
            seq
            for seq in seqs
            if (table := seq.block_table) is not tables[seq.seat]
            or len(table) != num_blocks[seq.seat]
        ]
        if not changed:
            return None
        changes = SeatChanges()
        for seq in changed:
            self._take_change(seq, changes)
        return changes

    def _take_change(self, seq: Sequence, changes: SeatChanges) -> None:
        seat, table = seq.seat, seq.block_table
        assert 0 <= seat < self.padding_seat and 0 < len(table) <= self.max_blocks
        known = self._num_blocks[seat]
        if self._tables[seat] is not table:
            known = 0
            self._tables[seat] = table
        if self._owners[seat] is not seq:
            self._owners[seat] = seq
            self._needs[seat] = _needs(seq)
            params = seq.sampling
            changes.taken_seats.append(seat)
            changes.top_ks.append(params.top_k)
            changes.seeds.append(_signed(params.seed))
            changes.reals.extend((params.temperature, params.top_p, params.min_p))
        first = seat * self.max_blocks
        changes.places.extend(range(first + known, first + len(table)))
        changes.block_ids.extend(table[known:])
        self._num_blocks[seat] = len(table)

    def apply(self, changes: SeatChanges) -> None:
        """Write what `take_changes` gave, before anything that comes after on this stream."""
        places, block_ids, taken, top_ks, seeds, bits = upload(
            [
                changes.places,
                changes.block_ids,
                changes.taken_seats,
                changes.top_ks,
                changes.seeds,
                changes.reals,
            ],
            self.device,
        )
        self.flat_tables.index_copy_(0, places, block_ids)
        if len(changes.taken_seats):
            reals = bits.view(torch.float64).view(-1, 3).to(torch.float32)
            self._temperatures.index_copy_(0, taken, reals[:, 0])
            self._top_ps.index_copy_(0, taken, reals[:, 1])
            self._min_ps.index_copy_(0, taken, reals[:, 2])
            self._top_ks.index_copy_(0, taken, top_ks)
            self._seeds.index_copy_(0, taken, seeds)

    def needs(self, seqs: Iterable[Sequence]) -> int:
        """DRAWS, ADJUSTS and WANTS_LOGPROBS, as far as one of `seqs` has them."""
        seen = self._needs
        together = 0
        for needs in {seen[seq.seat] for seq in seqs}:
            together |= needs
        return together

    def tables(
        self, seats: torch.Tensor, context_lens: torch.Tensor, width: int, block_size: int
    ) -> torch.Tensor:
        """The block tables [num_rows, width] of `seats`, whose contexts have `context_lens`."""
        tables = self.block_tables[:, :width].index_select(0, seats)
        if self.pads_tables and len(tables) > 1:
            starts = torch.arange(0, width * block_size, block_size, device=self.device)
            tables = torch.where(starts < context_lens.unsqueeze(1), tables, tables[:, :1])
        return tables

    def sampling_rows(self, seats: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """How the tokens of `seats` [num_rows] are drawn that will stand at `positions`."""
        return SamplingRows(
            temperatures=self._temperatures.index_select(0, seats),
            top_ks=self._top_ks.index_select(0, seats),
            top_ps=self._top_ps.index_select(0, seats),
            min_ps=self._min_ps.index_select(0, seats),
            seeds=self._seeds.index_select(0, seats),
            positions=positions,
        )


def _needs(seq: Sequence) -> int:
    params = seq.sampling
    adjusts = (
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or seq.stop.min_tokens
    )
    return (
        (DRAWS if params.temperature > 0 else 0)
        | (ADJUSTS if adjusts else 0)
        | (WANTS_LOGPROBS if params.logprobs is not None else 0)
    )


def _signed(seed: int) -> int:
    """The int64 of the same 64 bits."""
    return ((seed + 2**63) % 2**64) - 2**63
