"""One step's work: packed on the host, then as tensors, built once and passed down."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import NamedTuple

import torch

from tandem.engine.batch.rows import BatchRows
from tandem.engine.batch.upload import upload
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence
from tandem.runtime.wire.block_hash import num_blocks_of

NO_POSITION = -1  # of a row of padding


class ScoredChunk(NamedTuple):
    """Prompt tokens of a chunk whose log probabilities are wanted."""

    seq: Sequence
    start: int  # position before the first of them, whose logits are those of `row`
    row: int  # of the step's tokens
    token_ids: "array[int]"


# Not frozen, like Rows and Batch: every step makes them, and frozen it takes 3 us more.
@dataclass(slots=True)
class PackedStep:
    """Chunks of one token (decodes) come first, then the longer ones (prefills)."""

    num_decodes: int
    num_prefills: int
    sampled: list[Chunk]  # those that sample, in the order in which they were given
    sampled_ends: "array[int]"  # [num_samples] the tokens of their contexts
    batch_rows: "array[int]"  # [num_tokens]
    positions: "array[int]"  # [num_tokens]
    token_ids: "array[int]"  # [num_tokens] PENDING: the token that was drawn for the batch row
    prefill_batch_rows: "array[int]"  # [num_prefills]
    prefill_context_lens: "array[int]"  # [num_prefills]
    prefill_cu_seqlens: "array[int]"  # [num_prefills + 1]
    logits_indices: "array[int]"  # [num_samples]; empty if samples_all
    scored: list[ScoredChunk]

    @property
    def is_decode(self) -> bool:
        """True when each chunk is one token, and at least one of them samples."""
        return not self.num_prefills and bool(self.sampled_ends) and not self.scored

    @property
    def samples_all(self) -> bool:
        """True when each chunk is one token that samples."""
        return len(self.sampled_ends) == self.num_decodes and not self.num_prefills

    @property
    def samples_prefills(self) -> bool:
        """True when each chunk is a prefill that samples."""
        return len(self.sampled_ends) == self.num_prefills and not self.num_decodes

    def padded(self, num_tokens: int, padding_row: int) -> "list[array[int]]":
        """Return batch rows, positions and token ids of a decode step, each `num_tokens` long."""
        num_padding = num_tokens - self.num_decodes
        return [
            self.batch_rows + array("q", [padding_row]) * num_padding,
            self.positions + array("q", [NO_POSITION]) * num_padding,
            self.token_ids + array("q", [0]) * num_padding,
        ]


@dataclass(slots=True)
class Rows:
    """Sequences of a step and their contexts; past a context a table is as BatchRows leaves it."""

    batch_rows: torch.Tensor  # [num_rows]
    context_lens: torch.Tensor  # [num_rows] 0: padding
    block_tables: torch.Tensor  # [num_rows, max_blocks]

    def __len__(self) -> int:
        return self.batch_rows.shape[0]


@dataclass(slots=True)
class Batch:
    """A step on the device, as the first group of layers sees it."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slot_mapping: torch.Tensor  # [num_tokens] token |-> block_id * block_size + offset, -1: nowhere
    decodes: Rows  # of the first tokens, one each
    prefills: Rows
    prefill_cu_seqlens: torch.Tensor  # [num_prefills + 1], 0 is the first prefill token
    max_query_len: int  # of the prefills
    sampled: Rows  # in chunk order; the drawn token stands where the context ends
    logits_indices: torch.Tensor  # [num_samples] the token of each row of `sampled`
    samples_all: bool  # each token is a row of `sampled`, in this order
    others: "tuple[Batch, ...]" = ()  # of further groups: other slots and block tables

    def of_group(self, group: int) -> "Batch":
        """Return the batch with the slots and block tables of a group of layers."""
        return self.others[group - 1] if group else self


def pack_step(chunks: list[Chunk]) -> PackedStep:
    """Pack `chunks` into arrays. Leaves the sequences as they are."""
    seqs, starts, ends, samples = zip(*chunks, strict=True)
    if sum(ends) - sum(starts) == len(chunks):  # none has less than a token
        decodes, prefills = chunks, []
    else:
        decodes = [chunk for chunk in chunks if chunk.end - chunk.start == 1]
        prefills = [chunk for chunk in chunks if chunk.end - chunk.start > 1]
        seqs, starts, _, _ = zip(*decodes, strict=True) if decodes else ((), (), (), ())
    batch_rows = array("q", [seq.batch_row for seq in seqs])
    positions = array("q", starts)
    token_ids = array("q", [seq.token_ids[start] for seq, start in zip(seqs, starts, strict=True)])
    cu_seqlens = array("q", [0])
    for seq, start, end, _ in prefills:
        batch_rows.extend(repeat(seq.batch_row, end - start))
        positions.extend(range(start, end))
        token_ids.extend(seq.token_ids[start:end])
        cu_seqlens.append(cu_seqlens[-1] + end - start)
    sampled, sampled_ends = chunks, array("q", ends)
    if not all(samples):
        sampled = [chunk for chunk in chunks if chunk.samples]
        sampled_ends = array("q", [chunk.end for chunk in sampled])
    is_whole = not prefills and len(sampled) == len(chunks)
    return PackedStep(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        sampled=sampled,
        sampled_ends=sampled_ends,
        batch_rows=batch_rows,
        positions=positions,
        token_ids=token_ids,
        prefill_batch_rows=array("q", [chunk.seq.batch_row for chunk in prefills]),
        prefill_context_lens=array("q", [chunk.end for chunk in prefills]),
        prefill_cu_seqlens=cu_seqlens,
        logits_indices=array("q", [] if is_whole else _logits_indices(chunks, len(decodes))),
        scored=[] if is_whole else _scored_chunks(decodes + prefills),
    )


def build_batch(step: PackedStep, table: BatchRows, block_size: int) -> Batch:
    """Build the tensors of `step`. Its changes must have been applied to `table`."""
    num_decodes = step.num_decodes
    sections = [step.batch_rows, step.positions, step.token_ids, step.logits_indices]
    if step.num_prefills:
        sections += [step.prefill_batch_rows, step.prefill_context_lens, step.prefill_cu_seqlens]
    token_rows, positions, token_ids, indices, *of_prefills = upload(sections, table.device)
    if PENDING in step.token_ids:
        token_ids = _with_drawn(token_ids, token_rows, table)
    ends = positions + 1
    if step.samples_all:
        indices = table.ordinals[:num_decodes]
    longest = max(step.positions[:num_decodes], default=0) + 1
    longest_sampled = max(step.sampled_ends, default=0)
    no_rows = Rows(table.no_rows, table.no_rows, table.no_tables)
    batch_rows, context_lens, cu_seqlens = of_prefills or [table.no_rows] * 3
    longest_prefill = max(step.prefill_context_lens, default=0)

    def of_group(group: int) -> Batch:
        def rows(batch_rows: torch.Tensor, context_lens: torch.Tensor, longest: int) -> Rows:
            width = num_blocks_of(longest, block_size)
            tables = table.tables(batch_rows, context_lens, width, block_size, group)
            return Rows(batch_rows, context_lens, tables)

        decodes = prefills = no_rows
        if num_decodes and not step.num_prefills:
            decodes = rows(token_rows, ends, longest)
        elif num_decodes:
            decodes = rows(token_rows[:num_decodes], ends[:num_decodes], longest)
        if step.num_prefills:
            prefills = rows(batch_rows, context_lens, longest_prefill)
        if step.samples_all:
            sampled = decodes
        elif step.samples_prefills:
            sampled = prefills
        else:
            sampled_rows, sampled_ends = (t.index_select(0, indices) for t in (token_rows, ends))
            sampled = rows(sampled_rows, sampled_ends, longest_sampled)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=_slots(token_rows, positions, table, block_size, group),
            decodes=decodes,
            prefills=prefills,
            prefill_cu_seqlens=cu_seqlens,
            max_query_len=_longest_query(step.prefill_cu_seqlens),
            sampled=sampled,
            logits_indices=indices,
            samples_all=step.samples_all,
        )

    return _of_groups(of_group, table)


def build_decode_batch(inputs: torch.Tensor, table: BatchRows, block_size: int) -> Batch:
    """Build the tensors of a padded decode step, by operations that a graph can hold.

    (torch.where copies a number that it is given from the host, which a graph cannot.)
    `inputs` [3, num_tokens] are batch rows, positions and token ids. A row without a position is
    padding: it has no context, is stored nowhere, and its token belongs to no sequence.
    """
    token_rows, positions, token_ids = inputs.unbind(0)
    stored = positions.clamp(min=0)
    ends = positions + 1
    token_ids = _with_drawn(token_ids, token_rows, table)

    def of_group(group: int) -> Batch:
        slots = _slots(token_rows, stored, table, block_size, group)
        tables = table.tables(token_rows, ends, table.max_blocks, block_size, group)
        rows = Rows(token_rows, ends, tables)
        return Batch(
            token_ids=token_ids,
            positions=stored,
            slot_mapping=slots.masked_fill_(positions < 0, -1),
            decodes=rows,
            prefills=Rows(table.no_rows, table.no_rows, table.no_tables),
            prefill_cu_seqlens=table.no_rows,
            max_query_len=0,
            sampled=rows,
            logits_indices=table.ordinals[: inputs.shape[1]],
            samples_all=True,
        )

    return _of_groups(of_group, table)


def started_blocks(chunks: list[Chunk], num_groups: int, block_size: int) -> list[int]:
    """Return the blocks that a step of `chunks` is the first to write to and does not fill."""
    started: list[int] = []
    for chunk in chunks:
        ordinal, num_used = divmod(chunk.end, block_size)
        if num_used and chunk.start <= ordinal * block_size:
            first = ordinal * num_groups
            started += chunk.seq.block_table[first : first + num_groups]
    return started


def _of_groups(of_group: Callable[[int], Batch], table: BatchRows) -> Batch:
    batch = of_group(0)
    batch.others = tuple(of_group(group) for group in range(1, table.num_groups))
    return batch


def _with_drawn(
    token_ids: torch.Tensor, token_rows: torch.Tensor, table: BatchRows
) -> torch.Tensor:
    # Where drawing failed any token will do: the sequence fails with the step that drew.
    drawn = table.drawn.index_select(0, token_rows).clamp(min=0)
    return torch.where(token_ids == PENDING, drawn, token_ids)


def _slots(
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    table: BatchRows,
    block_size: int,
    group: int,
) -> torch.Tensor:
    ordinals = positions.div(block_size, rounding_mode="floor")
    places = torch.add(ordinals, token_rows, alpha=table.max_blocks)
    if table.num_groups > 1:
        places = places.mul_(table.num_groups).add_(group)
    block_ids = table.flat_tables.index_select(0, places)
    return torch.add(positions, block_ids.sub_(ordinals), alpha=block_size)


def _logits_indices(chunks: list[Chunk], num_decodes: int) -> list[int]:
    """Return the index of each sampling chunk's last token, in the order of `chunks`."""
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


def _scored_chunks(chunks: list[Chunk]) -> list[ScoredChunk]:
    """Return the scored parts of `chunks`, which are in the order of the step's tokens."""
    scored: list[ScoredChunk] = []
    row = 0
    for seq, start, end, _ in chunks:
        num_scored = min(end, seq.num_prompt_tokens - 1) - start
        if seq.prompt_scores is not None and num_scored > 0:
            following = array("q", seq.token_ids[start + 1 : start + 1 + num_scored])
            scored.append(ScoredChunk(seq, start, row, following))
        row += end - start
    return scored


def _longest_query(cu_seqlens: "array[int]") -> int:
    return max((end - start for start, end in pairwise(cu_seqlens)), default=0)
