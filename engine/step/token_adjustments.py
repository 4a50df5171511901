"""Penalties, logit bias and min_tokens of a step's rows, as the entries that sampling takes.

Entries are built from the tokens that the host knows. A token that a launched step is still drawing
is counted on the device: in that token's entry, if its row has one, else in a spare entry.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tandem.engine.batch.rows import BatchRows
from tandem.engine.batch.upload import upload
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence
from tandem.kernels.sampling.rows import NO_TOKEN, TokenAdjustments

NOWHERE = -1  # `times` of a token that is in neither prompt nor answer


class Adjusted(NamedTuple):
    """The tokens of one row whose logits change; there may be as many as a prompt has."""

    times: dict[int, int]  # of all of them, in the order of their entries
    biases: dict[int, float]
    held: set[int]


def adjusted_tokens(seq: Sequence, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Adjusted:
    """Return the tokens whose logits change before `seq` draws, except for a pending one."""
    params = seq.sampling
    times = dict.fromkeys(seq.token_ids, 0) if params.repetition_penalty != 1 else {}
    if counts_tokens(seq):
        times |= Counter(seq.token_ids[seq.num_prompt_tokens :])
    times.pop(PENDING, None)
    given = params.logit_bias or {}
    biases = {token_id: bias for token_id, bias in given.items() if 0 <= token_id < vocab_size}
    held: set[int] = set()
    # Under a grammar the mask holds tokens back (masks.py), which may leave no others.
    if seq.matcher is None and seq.num_generated_tokens < seq.stop.min_tokens:
        ends = (*seq.stop.stop_token_ids, *(() if seq.stop.ignore_eos else eos_token_ids))
        held = {token_id for token_id in ends if 0 <= token_id < vocab_size}
    for token_id in (*biases, *held):
        times.setdefault(token_id, NOWHERE)
    return Adjusted(times, biases, held)


def counts_tokens(seq: Sequence) -> bool:
    """Return True when the penalties of `seq` depend on the tokens that it has generated."""
    params = seq.sampling
    return bool(
        params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class AdjustedRows:
    """TokenAdjustments on the host, built row by row; int64 columns, or float64."""

    starts: "array[int]" = field(default_factory=_column)  # per row
    lengths: "array[int]" = field(default_factory=_column)
    held_until: "array[int]" = field(default_factory=_column)
    penalties: "array[float]" = field(default_factory=lambda: array("d"))  # 3 per row
    token_ids: "array[int]" = field(default_factory=_column)  # per entry
    times: "array[int]" = field(default_factory=_column)
    held: "array[int]" = field(default_factory=_column)
    biases: "array[float]" = field(default_factory=lambda: array("d"))
    spare_of: "array[int]" = field(default_factory=_column)  # the spare of its row, or -1
    spare_rows: "array[int]" = field(default_factory=_column)  # per spare entry
    spare_batch_rows: "array[int]" = field(default_factory=_column)
    spare_places: "array[int]" = field(default_factory=_column)  # among the entries

    def add(self, chunk: Chunk, changed: Adjusted) -> None:
        """Add a row with the entries that `adjusted_tokens` returned for it."""
        seq, params = chunk.seq, chunk.seq.sampling
        num_before, num_spares = len(self.token_ids), len(self.spare_rows)
        has_spare = seq.token_ids[-1] == PENDING and counts_tokens(seq)
        self._add_entries(changed, num_spares if has_spare else -1)
        if has_spare:
            self.spare_rows.append(len(self.starts))
            self.spare_batch_rows.append(seq.batch_row)
            self.spare_places.append(len(self.token_ids))
            self._add_entries(Adjusted({0: 1}, {}, set()), -1)
        self.starts.append(num_before)
        self.lengths.append(len(self.token_ids) - num_before)
        # The position at which the answer has its min_tokens.
        self.held_until.append(chunk.end + seq.stop.min_tokens - seq.num_generated_tokens)
        self.penalties.extend(
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        )

    def _add_entries(self, changed: Adjusted, spare: int) -> None:
        """Add entries by whole columns: one by one they would take the time of a step."""
        times, biases, held = changed
        none = bytes(8 * len(times))
        self.token_ids.extend(times)
        self.times.extend(times.values())
        self.held.extend(array("q", [each in held for each in times] if held else none))
        self.biases.extend(
            array("d", [biases.get(each, 0.0) for each in times] if biases else none)
        )
        self.spare_of.extend(array("q", [spare]) * len(times))

    def tensors(self, table: BatchRows) -> TokenAdjustments:
        """Copy the rows to the device at once, and count pending tokens there."""
        starts, lengths, held_until, penalties, *entries, rows, owners, places = upload(
            [
                self.starts,
                self.lengths,
                self.held_until,
                self.penalties,
                self.token_ids,
                self.times,
                self.held,
                self.biases,
                self.spare_of,
                self.spare_rows,
                self.spare_batch_rows,
                self.spare_places,
            ],
            table.device,
        )
        token_ids, times, held, biases, spare_of = entries
        if len(self.spare_rows):
            drawn = table.drawn.index_select(0, owners)
            spares = _Spares(rows, places, drawn)
            token_ids, times, lengths = spares.counted(token_ids, times, lengths, spare_of)
        by_row = penalties.view(torch.float64).view(-1, 3).t()
        num_rows = len(starts)
        aligned = torch.empty(3, num_rows + -num_rows % 4, device=table.device)  # to 16 bytes
        aligned[:, :num_rows] = by_row
        repetition, frequency, presence = aligned[:, :num_rows].unbind(0)
        return TokenAdjustments(
            starts=starts,
            lengths=lengths,
            token_ids=token_ids.to(torch.int32),
            times=times.to(torch.int32),
            biases=biases.view(torch.float64).to(torch.float32),
            held=held.to(torch.bool),
            repetition_penalties=repetition,
            frequency_penalties=frequency,
            presence_penalties=presence,
            held_until=held_until,
        )


class _Spares(NamedTuple):
    """The spare entries of rows whose newest token only the device knows."""

    rows: torch.Tensor  # [num_spares]
    places: torch.Tensor  # [num_spares] among the entries
    drawn: torch.Tensor  # [num_spares] the row's newest token, or NO_TOKEN

    def counted(
        self,
        token_ids: torch.Tensor,  # [num_entries]
        times: torch.Tensor,  # [num_entries]
        lengths: torch.Tensor,  # [num_rows]
        spare_of: torch.Tensor,  # [num_entries] the spare of the entry's row, -1: it has none
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return token ids, times and lengths with every newest token counted once."""
        # torch.where with a number would make the host wait.
        sought = self.drawn.index_select(0, spare_of.clamp(min=0))
        sought.masked_fill_(spare_of < 0, NO_TOKEN)
        is_newest = token_ids == sought
        times = torch.where(is_newest, times.clamp(min=0) + 1, times)
        num_found = torch.zeros_like(self.drawn)
        num_found.index_add_(0, spare_of.clamp(min=0), is_newest.to(torch.int64))
        # A row's list ends before a spare entry that is not needed: no token may have two entries.
        is_needed = (num_found == 0) & (self.drawn != NO_TOKEN)
        lengths = lengths.index_add(0, self.rows, is_needed.to(torch.int64) - 1)
        token_ids = token_ids.index_copy(0, self.places, self.drawn.clamp(min=0))
        return token_ids, times, lengths
