"""The state of running sequences on the device, by batch row.

The host sends changes alone: blocks that were added, and sequences that took a batch row. A step
leaves the tokens that it draws here, so that the next one need not wait for the host to learn them.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tandem.engine.batch.upload import upload
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.schedule.windows import NO_BLOCK
from tandem.kernels.sampling.rows import SamplingRows

# A sequence's requests to sampling beyond the likeliest token.
DRAWS = 1
ADJUSTS = 2
WANTS_LOGPROBS = 4
FOLLOWS_GRAMMAR = 8


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class RowChanges:
    """Changes that the device does not have yet, column by column."""

    places: "array[int]" = field(default_factory=_column)  # in block_tables, flat
    block_ids: "array[int]" = field(default_factory=_column)  # there
    taken_rows: "array[int]" = field(default_factory=_column)  # by another sequence than before
    top_ks: "array[int]" = field(default_factory=_column)
    seeds: "array[int]" = field(default_factory=_column)
    reals: "array[float]" = field(default_factory=lambda: array("d"))  # 3 for each taken row


class BatchRows:
    """`max_num_seqs` rows for sequences, and one after them, without an owner, for padding.

    A sequence owns its row from its first step there to the first step of the row's next owner.
    Steps must run on the device in the order in which their changes were taken. `max_blocks` are
    those of each of `num_groups` groups of layers. `pads_tables`: the
    kernels read blocks past a context and multiply them by zero, so these must hold finite numbers.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        *,
        num_groups: int = 1,
        pads_tables: bool = False,
    ) -> None:
        num_rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.max_blocks = max_blocks
        self.num_groups = num_groups
        self.device = device
        self.pads_tables = pads_tables
        # [num_rows, max_blocks, num_groups] past a sequence's blocks and before a window, anything
        self.block_tables = torch.zeros(
            num_rows, max_blocks, num_groups, dtype=torch.int64, device=device
        )
        self.flat_tables = self.block_tables.view(-1)
        self.ordinals = torch.arange(num_rows, device=device)
        # For batches without such rows: a slice of a tensor takes a microsecond.
        self.no_rows = torch.empty(0, dtype=torch.int64, device=device)
        self.no_tables = torch.empty(0, 0, dtype=torch.int64, device=device)
        # [num_rows] the last token drawn, NO_TOKEN if that failed
        self.drawn = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # [num_rows] each: a column that is gathered alone starts where Triton expects it to.
        self._temperatures, self._top_ps, self._min_ps = torch.zeros(3, num_rows, device=device)
        self._top_ks, self._seeds = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self._needs = bytearray(num_rows)
        # The tables that the device has. The lists are kept: the id of a freed one would come back.
        self._tables: list[list[int]] = [[] for _ in range(num_rows)]
        self._num_blocks = [0] * num_rows
        self._owners: list[Sequence | None] = [None] * num_rows

    def take_changes(self, seqs: list[Sequence]) -> RowChanges | None:
        """Return the changes to apply before a step of `seqs`, and count them as applied.

        A sequence's `block_table` is one list that only grows, or another list. Blocks that were
        given back are no change.
        """
        tables, num_blocks = self._tables, self._num_blocks
        changed = [
            seq
            for seq in seqs
            if (table := seq.block_table) is not tables[seq.batch_row]
            or len(table) != num_blocks[seq.batch_row]
        ]
        if not changed:
            return None
        changes = RowChanges()
        for seq in changed:
            self._take_change(seq, changes)
        return changes

    def _take_change(self, seq: Sequence, changes: RowChanges) -> None:
        row, table = seq.batch_row, seq.block_table
        size = self.max_blocks * self.num_groups
        assert 0 <= row < self.padding_row and 0 < len(table) <= size
        known = self._num_blocks[row]
        if self._tables[row] is not table:
            known = 0
            self._tables[row] = table
        if self._owners[row] is not seq:
            self._owners[row] = seq
            self._needs[row] = _needs(seq)
            params = seq.sampling
            changes.taken_rows.append(row)
            changes.top_ks.append(params.top_k)
            changes.seeds.append(_signed(params.seed))
            changes.reals.extend((params.temperature, params.top_p, params.min_p))
        first, fresh = row * size, table[known:]
        changes.places.extend(range(first + known, first + len(table)))
        if NO_BLOCK in fresh:
            fresh = [max(0, block_id) for block_id in fresh]
        changes.block_ids.extend(fresh)
        self._num_blocks[row] = len(table)

    def forget(self, seqs: list[Sequence]) -> None:
        """Let `take_changes` return all of `seqs` anew: what it returned may not be applied."""
        for seq in seqs:
            self._tables[seq.batch_row] = []
            self._owners[seq.batch_row] = None

    def apply(self, changes: RowChanges) -> None:
        """Write what `take_changes` returned, before all that follows on this stream."""
        sections: list[array[int] | array[float]] = [changes.places, changes.block_ids]
        if changes.taken_rows:
            sections += [changes.taken_rows, changes.top_ks, changes.seeds, changes.reals]
        places, block_ids, *of_taken = upload(sections, self.device)
        self.flat_tables.index_copy_(0, places, block_ids)
        if of_taken:
            taken, top_ks, seeds, bits = of_taken
            reals = bits.view(torch.float64).view(-1, 3).to(torch.float32)
            self._temperatures.index_copy_(0, taken, reals[:, 0])
            self._top_ps.index_copy_(0, taken, reals[:, 1])
            self._min_ps.index_copy_(0, taken, reals[:, 2])
            self._top_ks.index_copy_(0, taken, top_ks)
            self._seeds.index_copy_(0, taken, seeds)

    def needs(self, seqs: Iterable[Sequence]) -> int:
        """Return the needs, of those above, that at least one of `seqs` has."""
        seen = self._needs
        together = 0
        for needs in {seen[seq.batch_row] for seq in seqs}:
            together |= needs
        return together

    def tables(
        self,
        batch_rows: torch.Tensor,
        context_lens: torch.Tensor,
        width: int,
        block_size: int,
        group: int = 0,
    ) -> torch.Tensor:
        """Return block tables [num_rows, width] of `batch_rows`, whose contexts are that long."""
        tables = self.block_tables[:, :width, group].index_select(0, batch_rows)
        if self.pads_tables and len(tables) > 1:
            starts = torch.arange(0, width * block_size, block_size, device=self.device)
            tables = torch.where(starts < context_lens.unsqueeze(1), tables, tables[:, :1])
        return tables

    def sampling_rows(self, batch_rows: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """Return the parameters with which `batch_rows` [num_rows] draw tokens for `positions`."""
        return SamplingRows(
            temperatures=self._temperatures.index_select(0, batch_rows),
            top_ks=self._top_ks.index_select(0, batch_rows),
            top_ps=self._top_ps.index_select(0, batch_rows),
            min_ps=self._min_ps.index_select(0, batch_rows),
            seeds=self._seeds.index_select(0, batch_rows),
            positions=positions,
        )


def _needs(seq: Sequence) -> int:
    params = seq.sampling
    adjusts = (
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or (seq.stop.min_tokens and seq.matcher is None)
    )
    return (
        (DRAWS if params.temperature > 0 else 0)
        | (ADJUSTS if adjusts else 0)
        | (WANTS_LOGPROBS if params.logprobs is not None else 0)
        | (FOLLOWS_GRAMMAR if seq.matcher is not None else 0)
    )


def _signed(seed: int) -> int:
    """Return the int64 with the same 64 bits."""
    return ((seed + 2**63) % 2**64) - 2**63
