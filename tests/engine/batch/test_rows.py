"""What the device is told of the running sequences: enough, and not twice."""

import random
from array import array

import pytest
import torch

from tandem.engine.batch.rows import ADJUSTS, DRAWS, WANTS_LOGPROBS, BatchRows
from tandem.engine.batch.upload import in_pairs, upload
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.wire.messages import SamplingParams, StopConditions

CPU = torch.device("cpu")
MAX_NUM_SEQS = 5
MAX_BLOCKS = 9


def sequence(batch_row: int, table: list[int], min_tokens: int = 0, **sampling: object) -> Sequence:
    return Sequence(
        "s",
        [1],
        1,
        SamplingParams(**sampling),
        StopConditions(max_tokens=9, min_tokens=min_tokens),
        block_table=table,
        batch_row=batch_row,
    )


def tell(batch_rows: BatchRows, *seqs: Sequence) -> bool:
    """Whether there was something to tell of `seqs`."""
    changes = batch_rows.take_changes(list(seqs))
    if changes is not None:
        batch_rows.apply(changes)
    return changes is not None


def random_sequence(rng: random.Random, batch_row: int) -> Sequence:
    return sequence(
        batch_row,
        rng.sample(range(100), rng.randint(1, MAX_BLOCKS)),
        temperature=rng.choice([0.0, 0.5, 1.3]),
        top_p=rng.choice([0.9, 1.0]),
        min_p=rng.choice([0.0, 0.1]),
        top_k=rng.choice([0, 40]),
        seed=rng.randrange(2**64),
    )


def assert_knows(batch_rows: BatchRows, seqs: list[Sequence]) -> None:
    for seq in seqs:
        table = batch_rows.block_tables[seq.batch_row, : len(seq.block_table), 0]
        assert table.tolist() == seq.block_table
    index = torch.tensor([seq.batch_row for seq in seqs])
    positions = torch.arange(len(seqs))
    rows = batch_rows.sampling_rows(index, positions)
    params = [seq.sampling for seq in seqs]
    assert rows.temperatures.tolist() == pytest.approx([p.temperature for p in params])
    assert rows.top_ps.tolist() == pytest.approx([p.top_p for p in params])
    assert rows.min_ps.tolist() == pytest.approx([p.min_p for p in params])
    assert rows.top_ks.tolist() == [p.top_k for p in params]
    assert [seed % 2**64 for seed in rows.seeds.tolist()] == [p.seed for p in params]
    assert all(column.is_contiguous() for column in (rows.temperatures, rows.top_ks, rows.seeds))
    assert rows.positions is positions


@pytest.mark.parametrize("seed", range(20))
def test_the_device_knows_of_every_step_what_the_host_knows(seed: int) -> None:
    """Sequences come and go, tables grow in place and are replaced, in any order."""
    rng = random.Random(seed)
    batch_rows = BatchRows(MAX_NUM_SEQS, MAX_BLOCKS, CPU)
    owners = {batch_row: random_sequence(rng, batch_row) for batch_row in range(MAX_NUM_SEQS)}
    for _ in range(200):
        batch_row = rng.randrange(MAX_NUM_SEQS)
        seq = owners[batch_row]
        match rng.randrange(4):
            case 0:
                owners[batch_row] = random_sequence(rng, batch_row)
            case 1:
                seq.block_table = rng.sample(range(100), rng.randint(1, MAX_BLOCKS))
            case 2 if len(seq.block_table) < MAX_BLOCKS:
                seq.block_table.append(rng.randrange(100))
            case 3:
                seq.block_table = list(seq.block_table)
        stepping = rng.sample(list(owners.values()), rng.randint(1, MAX_NUM_SEQS))
        tell(batch_rows, *stepping)
        assert_knows(batch_rows, stepping)


def test_nothing_is_sent_twice() -> None:
    batch_rows = BatchRows(MAX_NUM_SEQS, MAX_BLOCKS, CPU)
    seq, other = sequence(0, [4, 5]), sequence(1, [6])
    assert tell(batch_rows, seq, other)
    assert not tell(batch_rows, seq, other)
    seq.block_table.append(7)
    changes = batch_rows.take_changes([seq, other])
    assert changes is not None
    assert (list(changes.places), list(changes.block_ids)) == ([2], [7])
    assert len(changes.taken_rows) == 0


def test_the_next_owner_of_a_batch_row_is_told_in_full_whatever_was_there_before() -> None:
    batch_rows = BatchRows(MAX_NUM_SEQS, MAX_BLOCKS, CPU)
    tell(batch_rows, sequence(2, [1, 2, 3], temperature=0.7))
    # The dead one's list may give its address to the next one's.
    following = sequence(2, [9, 8, 7], temperature=0.2, top_k=3)
    assert tell(batch_rows, following)
    assert_knows(batch_rows, [following])


def test_what_sampling_needs_is_known_by_batch_row() -> None:
    batch_rows = BatchRows(MAX_NUM_SEQS, MAX_BLOCKS, CPU)
    greedy = sequence(0, [1], temperature=0.0)
    drawn = sequence(1, [2])
    held = sequence(2, [3], min_tokens=2, temperature=0.0)
    told = sequence(3, [4], temperature=0.0, logprobs=0, logit_bias={3: 1.0})
    tell(batch_rows, greedy, drawn, held, told)
    assert batch_rows.needs([greedy]) == 0
    assert batch_rows.needs([greedy, drawn]) == DRAWS
    assert batch_rows.needs([held]) == ADJUSTS
    assert batch_rows.needs([told, drawn]) == DRAWS | ADJUSTS | WANTS_LOGPROBS
    tell(batch_rows, sequence(1, [2], temperature=0.0))
    assert batch_rows.needs([greedy, drawn]) == 0


def test_a_padded_table_goes_on_with_its_own_first_block() -> None:
    batch_rows = BatchRows(MAX_NUM_SEQS, MAX_BLOCKS, CPU, pads_tables=True)
    tell(batch_rows, sequence(0, [5, 6, 7, 8]), sequence(3, [9]))
    index = torch.tensor([3, 0, batch_rows.padding_row])
    tables = batch_rows.tables(index, torch.tensor([4, 9, 0]), 4, block_size=4)
    assert tables.tolist() == [[9, 9, 9, 9], [5, 6, 7, 5], [0, 0, 0, 0]]


@pytest.mark.parametrize("lengths", [[0], [1], [2, 3, 0, 1], [5, 5]])
def test_sections_reach_a_gpu_where_its_kernels_expect_them(lengths: list[int]) -> None:
    sections = [array("q", range(length)) for length in lengths]
    even = in_pairs(sections)
    assert all(len(section) % 16 == 0 for section in even)
    assert [array("q", section)[:n] for section, n in zip(even, lengths, strict=True)] == sections


def test_sections_arrive_in_order_and_bit_by_bit() -> None:
    sections = [array("q", [1, -2]), array("d", [0.1, -3.5]), array("q"), array("q", [2**62])]
    first, reals, nothing, last = upload(sections, CPU)
    assert (first.tolist(), nothing.tolist(), last.tolist()) == ([1, -2], [], [2**62])
    assert reals.view(torch.float64).tolist() == [0.1, -3.5]
    assert [len(part) for part in upload([array("q"), array("d")], CPU)] == [0, 0]
