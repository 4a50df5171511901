"""One step's work: as the host packs it, and as tensors, built once and passed down."""

from array import array
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch

from tandem.engine.schedule.sequence import PENDING, Chunk
from tandem.engine.step.rows import Seats
from tandem.engine.step.upload import upload

NO_POSITION = -1  # of a row of padding


# Not frozen, like Batch: every step makes one, and frozen it takes 3 us more.
@dataclass(slots=True)
class PackedStep:
    """Chunks of one token (decodes) come first, then the longer ones (prefills)."""

    num_decodes: int
    num_prefills: int
    rows: list[Chunk]  # those that sample, in the order they were given in
    seats: "array[int]"  # [num_tokens]
    positions: "array[int]"  # [num_tokens]
    token_ids: "array[int]"  # [num_tokens] PENDING: the token that was drawn for the seat
    prefill_seats: "array[int]"  # [num_prefills]
    prefill_context_lens: "array[int]"  # [num_prefills]
    prefill_cu_seqlens: "array[int]"  # [num_prefills + 1]
    logits_indices: "array[int]"  # [num_samples]; empty if is_decode

    @property
    def is_decode(self) -> bool:
        """Whether all it does is to give one more token to every sequence."""
        return not self.num_prefills and len(self.rows) == self.num_decodes > 0

    def padded(self, num_tokens: int, padding_seat: int) -> "list[array[int]]":
        """Seats, positions and token ids of a decode step, each `num_tokens` long."""
        num_padding = num_tokens - self.num_decodes
        return [
            self.seats + array("q", [padding_seat]) * num_padding,
            self.positions + array("q", [NO_POSITION]) * num_padding,
            self.token_ids + array("q", [0]) * num_padding,
        ]


@dataclass(slots=True)
class Batch:
    """A step on the device. What a table has past its row's context is as Seats says."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slot_mapping: torch.Tensor  # [num_tokens] token |-> block_id * block_size + offset, -1: nowhere
    num_decodes: int
    decode_context_lens: torch.Tensor  # [num_decodes] 0: padding
    decode_block_tables: torch.Tensor  # [num_decodes, max_blocks]
    num_prefills: int
    max_query_len: int  # of the prefills
    prefill_context_lens: torch.Tensor  # [num_prefills]
    prefill_cu_seqlens: torch.Tensor  # [num_prefills + 1], 0 is the first prefill token
    prefill_block_tables: torch.Tensor  # [num_prefills, max_blocks]
    logits_indices: torch.Tensor  # [num_samples] tokens whose logits are wanted, in chunk order
    sampled_seats: torch.Tensor  # [num_samples]
    sampled_positions: torch.Tensor  # [num_samples] where the drawn token will stand
    sampled_block_tables: torch.Tensor  # [num_samples, max_blocks]
    samples_all: bool  # each token is a row, and in this order


def pack_step(chunks: list[Chunk]) -> PackedStep:
    """What the host has to say of `chunks`. Nothing of the sequences is changed."""
    decodes = [chunk for chunk in chunks if chunk.end - chunk.start == 1]
    prefills = []
    if len(decodes) < len(chunks):
        prefills = [chunk for chunk in chunks if chunk.end - chunk.start > 1]
    seats = array("q", [seq.seat for seq, _, _, _ in decodes])
    positions = array("q", [start for _, start, _, _ in decodes])
    token_ids = array("q", [seq.token_ids[start] for seq, start, _, _ in decodes])
    cu_seqlens = array("q", [0])
    for seq, start, end, _ in prefills:
        seats.extend(repeat(seq.seat, end - start))
        positions.extend(range(start, end))
        token_ids.extend(seq.token_ids[start:end])
        cu_seqlens.append(cu_seqlens[-1] + end - start)
    rows = [chunk for chunk in chunks if chunk.samples]
    is_whole = not prefills and len(rows) == len(chunks)
    return PackedStep(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        rows=rows,
        seats=seats,
        positions=positions,
        token_ids=token_ids,
        prefill_seats=array("q", [chunk.seq.seat for chunk in prefills]),
        prefill_context_lens=array("q", [chunk.end for chunk in prefills]),
        prefill_cu_seqlens=cu_seqlens,
        logits_indices=array("q", [] if is_whole else _logits_indices(chunks, len(decodes))),
    )


def build_batch(step: PackedStep, seats: Seats, block_size: int) -> Batch:
    """The tensors of `step`, whose seats' changes have been applied."""
    num_decodes, num_tokens = step.num_decodes, len(step.seats)
    sections = [step.seats, step.positions, step.token_ids, step.logits_indices]
    if step.num_prefills:
        sections += [step.prefill_seats, step.prefill_context_lens, step.prefill_cu_seqlens]
    token_seats, positions, token_ids, indices, *of_prefills = upload(sections, seats.device)
    if PENDING in step.token_ids:
        token_ids = _with_drawn(token_ids, token_seats, seats)
    ends = positions + 1
    sampled_seats, sampled_positions = token_seats, ends
    prefill_lens = cu_seqlens = positions[:0]
    prefill_tables = seats.block_tables[:0]
    if step.is_decode:
        indices = seats.ordinals[:num_tokens]
    else:
        sampled_seats = token_seats.index_select(0, indices)
        sampled_positions = ends.index_select(0, indices)
    if step.num_prefills:
        prefill_seats, prefill_lens, cu_seqlens = of_prefills
        width = _num_blocks(max(step.prefill_context_lens), block_size)
        prefill_tables = seats.tables(prefill_seats, prefill_lens, width, block_size)
    decode_lens = ends[:num_decodes]
    width = _num_blocks(max(step.positions[:num_decodes], default=0) + 1, block_size)
    decode_tables = seats.tables(token_seats[:num_decodes], decode_lens, width, block_size)
    sampled_tables = decode_tables
    if not step.is_decode:
        width = _num_blocks(max((row.end for row in step.rows), default=0), block_size)
        sampled_tables = seats.tables(sampled_seats, sampled_positions, width, block_size)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=_slots(token_seats, positions, seats, block_size),
        num_decodes=num_decodes,
        decode_context_lens=decode_lens,
        decode_block_tables=decode_tables,
        num_prefills=step.num_prefills,
        max_query_len=_longest_query(step.prefill_cu_seqlens),
        prefill_context_lens=prefill_lens,
        prefill_cu_seqlens=cu_seqlens,
        prefill_block_tables=prefill_tables,
        logits_indices=indices,
        sampled_seats=sampled_seats,
        sampled_positions=sampled_positions,
        sampled_block_tables=sampled_tables,
        samples_all=step.is_decode,
    )


def build_decode_batch(inputs: torch.Tensor, seats: Seats, block_size: int) -> Batch:
    """The tensors of a padded decode step, by operations that a graph can hold.

    (A number given to torch.where is copied from the host, which a graph can't.)
    `inputs` [3, num_tokens] are seats, positions and token ids; a row without a position is
    padding: it has no context, is stored nowhere, and its token is drawn for nobody.
    """
    token_seats, positions, token_ids = inputs.unbind(0)
    num_tokens = inputs.shape[1]
    stored = positions.clamp(min=0)
    slots = _slots(token_seats, stored, seats, block_size)
    ends = positions + 1
    nothing = positions[:0]
    tables = seats.tables(token_seats, ends, seats.max_blocks, block_size)
    return Batch(
        token_ids=_with_drawn(token_ids, token_seats, seats),
        positions=stored,
        slot_mapping=slots.masked_fill_(positions < 0, -1),
        num_decodes=num_tokens,
        decode_context_lens=ends,
        decode_block_tables=tables,
        num_prefills=0,
        max_query_len=0,
        prefill_context_lens=nothing,
        prefill_cu_seqlens=nothing,
        prefill_block_tables=seats.block_tables[:0],
        logits_indices=seats.ordinals[:num_tokens],
        sampled_seats=token_seats,
        sampled_positions=ends,
        sampled_block_tables=tables,
        samples_all=True,
    )


def started_blocks(chunks: list[Chunk], block_size: int) -> list[int]:
    """Block ids that this step writes to first, and doesn't fill."""
    started: list[int] = []
    for chunk in chunks:
        ordinal, num_used = divmod(chunk.end, block_size)
        if num_used and chunk.start <= ordinal * block_size:
            started.append(chunk.seq.block_table[ordinal])
    return started


def _with_drawn(token_ids: torch.Tensor, token_seats: torch.Tensor, seats: Seats) -> torch.Tensor:
    # Where drawing failed any token will do: the sequence fails with the step that drew.
    drawn = seats.drawn.index_select(0, token_seats).clamp(min=0)
    return torch.where(token_ids == PENDING, drawn, token_ids)


def _slots(
    token_seats: torch.Tensor, positions: torch.Tensor, seats: Seats, block_size: int
) -> torch.Tensor:
    ordinals = positions.div(block_size, rounding_mode="floor")
    places = torch.add(ordinals, token_seats, alpha=seats.max_blocks)
    block_ids = seats.flat_tables.index_select(0, places)
    return torch.add(positions, block_ids.sub_(ordinals), alpha=block_size)


def _logits_indices(chunks: list[Chunk], num_decodes: int) -> list[int]:
    """The row of each sampling chunk's last token, in the order of `chunks`."""
    indices: list[int] = []
    next_decode, next_prefill = 0, num_decodes
    for chunk in chunks:
        length = chunk.end - chunk.start
        if length == 1:
            last = next_decode
            next_decode += 1
        else:
            next_prefill += length
            last = next_prefill - 1
        if chunk.samples:
            indices.append(last)
    return indices


def _longest_query(cu_seqlens: "array[int]") -> int:
    return max((end - start for start, end in pairwise(cu_seqlens)), default=0)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
