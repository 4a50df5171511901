"""A step's tensors: each chunk that samples has a row, in the order of the chunks."""

import pytest
import torch

from tandem.engine.batch.batch import build_batch, pack_step
from tandem.engine.batch.rows import BatchRows
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.runtime.wire.messages import SamplingParams, StopConditions

BLOCK_SIZE = 4


def chunk(row: int, start: int, end: int, samples: bool = True) -> Chunk:
    """A chunk of a sequence in batch row `row`, whose blocks are 10 * row and those after it."""
    stop = StopConditions(max_tokens=9)
    seq = Sequence("s", list(range(end)), end, SamplingParams(), stop, batch_row=row)
    seq.block_table = [10 * row + i for i in range(-(-end // BLOCK_SIZE))]
    return Chunk(seq, start, end, samples)


STEPS = {
    "decodes": [chunk(3, 5, 6), chunk(1, 8, 9)],
    "whole prompts": [chunk(2, 0, 9), chunk(0, 4, 6)],
    "one prompt": [chunk(4, 0, 8)],
    "a prompt that goes on": [chunk(4, 0, 8, samples=False)],
    "a whole prompt and a part": [chunk(2, 0, 9), chunk(0, 0, 6, samples=False)],
    "decodes and prompts": [chunk(3, 5, 6), chunk(2, 0, 9), chunk(0, 0, 6, samples=False)],
    "a prompt of one token between others": [chunk(2, 0, 9), chunk(1, 0, 1), chunk(0, 0, 5)],
}


@pytest.mark.parametrize("chunks", STEPS.values(), ids=STEPS)
def test_each_chunk_that_samples_has_its_row_context_and_blocks(chunks: list[Chunk]) -> None:
    table = BatchRows(5, 9, torch.device("cpu"))
    changes = table.take_changes([each.seq for each in chunks])
    assert changes is not None
    table.apply(changes)
    batch = build_batch(pack_step(chunks), table, BLOCK_SIZE)
    sampling = [each for each in chunks if each.samples]
    rows = batch.sampled
    assert rows.batch_rows.tolist() == [each.seq.batch_row for each in sampling]
    assert rows.context_lens.tolist() == [each.end for each in sampling]
    for blocks, each in zip(rows.block_tables.tolist(), sampling, strict=True):
        assert blocks[: len(each.seq.block_table)] == each.seq.block_table
    ends = batch.positions.index_select(0, batch.logits_indices)
    assert ends.tolist() == [each.end - 1 for each in sampling]
    assert len(batch.decodes) + len(batch.prefills) == len(chunks)
