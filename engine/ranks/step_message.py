"""One step as rank 0 has decided it, for the ranks that compute it too."""

from array import array
from collections.abc import Collection

import msgspec

from tandem.engine.batch.batch import PackedStep
from tandem.engine.batch.rows import BatchRows, RowChanges
from tandem.engine.schedule.sequence import PENDING


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """The arrays of a PackedStep and of its RowChanges, each as the bytes of int64 numbers.

    Sampling is not in it: rank 0 draws from the logits of all ranks. Tokens are PENDING where
    ranks share what was drawn on their devices; else every token is known.
    """

    number: int
    num_decodes: int
    num_prefills: int
    batch_rows: bytes
    positions: bytes
    token_ids: bytes
    prefill_batch_rows: bytes
    prefill_context_lens: bytes
    prefill_cu_seqlens: bytes
    logits_indices: bytes
    sampled_ends: bytes
    scored: list[tuple[int, int]]  # the first row of each scored chunk, and its rows
    places: bytes
    block_ids: bytes
    boundaries: list[int]  # the layer counts at which all ranks meet
    is_recorded: bool  # it is the replay of a graph

    @classmethod
    def of(
        cls,
        number: int,
        step: PackedStep,
        changes: RowChanges | None,
        table: BatchRows | None,
        boundaries: Collection[int] = (),
        *,
        is_recorded: bool = False,
    ) -> "StepMessage":
        """Return the message of a step.

        With `table` all earlier steps have been computed, and the tokens they drew are in it.
        """
        changes = changes or RowChanges()
        return cls(
            number,
            step.num_decodes,
            step.num_prefills,
            step.batch_rows.tobytes(),
            step.positions.tobytes(),
            (step.token_ids if table is None else _known_tokens(step, table)).tobytes(),
            step.prefill_batch_rows.tobytes(),
            step.prefill_context_lens.tobytes(),
            step.prefill_cu_seqlens.tobytes(),
            step.logits_indices.tobytes(),
            step.sampled_ends.tobytes(),
            [(chunk.row, len(chunk.token_ids)) for chunk in step.scored],
            changes.places.tobytes(),
            changes.block_ids.tobytes(),
            sorted(boundaries),
            is_recorded,
        )

    def step(self) -> PackedStep:
        """Return the step, without the sequences that it samples and scores."""
        return PackedStep(
            num_decodes=self.num_decodes,
            num_prefills=self.num_prefills,
            sampled=[],
            sampled_ends=_numbers(self.sampled_ends),
            batch_rows=_numbers(self.batch_rows),
            positions=_numbers(self.positions),
            token_ids=_numbers(self.token_ids),
            prefill_batch_rows=_numbers(self.prefill_batch_rows),
            prefill_context_lens=_numbers(self.prefill_context_lens),
            prefill_cu_seqlens=_numbers(self.prefill_cu_seqlens),
            logits_indices=_numbers(self.logits_indices),
            scored=[],
        )

    def changes(self) -> RowChanges:
        """Return the changes of block tables."""
        return RowChanges(places=_numbers(self.places), block_ids=_numbers(self.block_ids))


def _numbers(data: bytes) -> "array[int]":
    numbers = array("q")
    numbers.frombytes(data)
    return numbers


def _known_tokens(step: PackedStep, table: BatchRows) -> "array[int]":
    """Return the step's tokens; those that an earlier step drew are read from `table`."""
    if PENDING not in step.token_ids:
        return step.token_ids
    drawn = table.drawn.clamp(min=0).tolist()
    return array(
        "q",
        (
            drawn[row] if token_id == PENDING else token_id
            for token_id, row in zip(step.token_ids, step.batch_rows, strict=True)
        ),
    )
