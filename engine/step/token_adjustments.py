"""Penalties, logit bias and min_tokens of a step's rows, as the entries that sampling takes.

They are built from the tokens that the host knows. One that a launched step is still drawing is
counted on the device: in the entry of that token, if its row has one, else in a spare entry.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence
from tandem.engine.step.rows import Seats
from tandem.engine.step.upload import upload
from tandem.kernels.sampling.rows import NO_TOKEN, TokenAdjustments

NOWHERE = -1  # how often a token was generated that is in neither prompt nor answer


class Entry(NamedTuple):
    times: int = NOWHERE
    bias: float = 0.0
    is_held: bool = False


def adjusted_tokens(
    seq: Sequence, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> dict[int, Entry]:
    """The tokens whose logits change before `seq` draws its next one, but for a pending one."""
    params, changed = seq.sampling, {}
    if params.repetition_penalty != 1:
        changed = dict.fromkeys(seq.token_ids, Entry(times=0))
    if counts_tokens(seq):
        generated = Counter(seq.token_ids[seq.num_prompt_tokens :])
        changed |= {token_id: Entry(times) for token_id, times in generated.items()}
    changed.pop(PENDING, None)
    for token_id, bias in (params.logit_bias or {}).items():
        if 0 <= token_id < vocab_size:
            changed[token_id] = changed.get(token_id, Entry())._replace(bias=bias)
    if seq.num_generated_tokens < seq.stop.min_tokens:
        held = {*seq.stop.stop_token_ids, *(() if seq.stop.ignore_eos else eos_token_ids)}
        for token_id in held:
            if 0 <= token_id < vocab_size:
                changed[token_id] = changed.get(token_id, Entry())._replace(is_held=True)
    return changed


def counts_tokens(seq: Sequence) -> bool:
    """Whether it matters to `seq` how often it has generated a token."""
    params = seq.sampling
    return bool(
        params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class AdjustedRows:
    """TokenAdjustments in the making, one row after another; int64 columns, or float64."""

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
    spare_seats: "array[int]" = field(default_factory=_column)
    spare_places: "array[int]" = field(default_factory=_column)  # among the entries

    def add(self, chunk: Chunk, changed: dict[int, Entry]) -> None:
        """A row, and `changed` that `adjusted_tokens` gave for it."""
        seq, params = chunk.seq, chunk.seq.sampling
        num_before, num_spares = len(self.token_ids), len(self.spare_rows)
        has_spare = seq.token_ids[-1] == PENDING and counts_tokens(seq)
        for token_id, entry in changed.items():
            self._add_entry(token_id, entry, num_spares if has_spare else -1)
        if has_spare:
            self.spare_rows.append(len(self.starts))
            self.spare_seats.append(seq.seat)
            self.spare_places.append(len(self.token_ids))
            self._add_entry(0, Entry(times=1), -1)
        self.starts.append(num_before)
        self.lengths.append(len(self.token_ids) - num_before)
        # Where the answer will have its min_tokens, by the row's own count of positions.
        self.held_until.append(chunk.end + seq.stop.min_tokens - seq.num_generated_tokens)
        self.penalties.extend(
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        )

    def _add_entry(self, token_id: int, entry: Entry, spare: int) -> None:
        self.token_ids.append(token_id)
        self.times.append(entry.times)
        self.held.append(entry.is_held)
        self.biases.append(entry.bias)
        self.spare_of.append(spare)

    def tensors(self, seats: Seats) -> TokenAdjustments:
        """The rows on the device, by one copy, pending tokens counted there."""
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
                self.spare_seats,
                self.spare_places,
            ],
            seats.device,
        )
        token_ids, times, held, biases, spare_of = entries
        if len(self.spare_rows):
            drawn = seats.drawn.index_select(0, owners)
            spares = _Spares(rows, places, drawn)
            token_ids, times, lengths = spares.counted(token_ids, times, lengths, spare_of)
        by_row = penalties.view(torch.float64).view(-1, 3).t().to(torch.float32)
        repetition, frequency, presence = by_row.contiguous().unbind(0)
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
    """The last entries of rows whose newest token only the device knows."""

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
        """Token ids, times and lengths with every newest token counted once."""
        # Not torch.where with a number, for which the host would wait.
        sought = self.drawn.index_select(0, spare_of.clamp(min=0))
        sought.masked_fill_(spare_of < 0, NO_TOKEN)
        is_newest = token_ids == sought
        times = torch.where(is_newest, times.clamp(min=0) + 1, times)
        num_found = torch.zeros_like(self.drawn)
        num_found.index_add_(0, spare_of.clamp(min=0), is_newest.to(torch.int64))
        # A row's list ends before a spare entry that isn't needed: no token may have two.
        is_needed = (num_found == 0) & (self.drawn != NO_TOKEN)
        lengths = lengths.index_add(0, self.rows, is_needed.to(torch.int64) - 1)
        token_ids = token_ids.index_copy(0, self.places, self.drawn.clamp(min=0))
        return token_ids, times, lengths
