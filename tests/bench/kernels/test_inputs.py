import torch

from tandem.bench.kernels.decode import log_uniform
from tandem.bench.kernels.pool import Pool, attend, context_of
from tandem.bench.kernels.prefill import prefill_case
from tandem.bench.report.setting import setting_for

DRY = setting_for("cpu")


def make_pool() -> Pool:
    return Pool(128, 3, 2, 8, DRY)


def test_no_two_sequences_share_a_block() -> None:
    table = make_pool().tables([40, 16, 33], 16, shuffled=True)
    used = [*table[0].tolist(), *table[1, :1].tolist(), *table[2].tolist()]
    assert table.shape == (3, 3) and len(set(used)) == 7
    assert used != sorted(used)
    in_order = make_pool().tables([40, 16], 16, shuffled=False)
    assert in_order.tolist() == [[0, 1, 2], [3, 0, 0]]


def test_a_context_is_read_through_its_table() -> None:
    pool = make_pool()
    keys, values = context_of(pool.layer(1, 16), torch.tensor([5, 2]), 20)
    assert keys.shape == values.shape == (20, 2, 8)
    assert torch.equal(keys[17], pool.blocks(16)[2, 1, 0, :, 1])
    assert torch.equal(values[3], pool.blocks(16)[5, 1, 1, :, 3])


def test_the_reference_attends_as_torch_does() -> None:
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    rows = torch.tensor([0, 3, 5])
    torch.testing.assert_close(attend(q[rows], rows, k, v, 8**-0.5), expected[rows])


def test_flops_count_the_positions_that_each_query_sees() -> None:
    whole = prefill_case("a", "a", [(3, 3)], 16, DRY, shuffled=False)
    chunk = prefill_case("a", "a", [(2, 40), (1, 1)], 16, DRY, shuffled=False)
    per_position = 4 * 4 * 16  # heads and head_dim of a dry run
    assert whole.work == per_position * (1 + 2 + 3)
    assert chunk.work == per_position * (39 + 40 + 1)


def test_ragged_lengths_are_the_same_in_every_run_and_reach_both_ends() -> None:
    lens = log_uniform(64, 16, 32768)
    assert lens == log_uniform(64, 16, 32768)
    assert (min(lens), max(lens), len(lens)) == (16, 32768, 64)
    assert 12 < sum(length < 256 for length in lens) < 36, "a third of the octaves"
