"""Decode attention: the Triton kernel and the PyTorch reference against attention in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl

from tandem.kernels.arrivals import arrivals
from tandem.kernels.attention import decode as paged_attention
from tandem.kernels.attention import decode_kernel
from tandem.kernels.attention.decode import PagedAttentionConfig
from tandem.kernels.cpu import launch
from tandem.kernels.reference import paged_attention as reference
from tandem.kernels.tuned import INTERPRETED, architecture
from tests.kernels.tolerance import DTYPES, on_cpu, tolerance

SCALE = 0.31
LARGEST_VALUE = 4.5  # of a few thousand normal numbers
Attend = Callable[..., None]
default = paged_attention.paged_decode_attention
# Splits of one tile, of a few, and of as many as there are; both ways of loading.
SMALL = PagedAttentionConfig(tile_tokens=16, blocks_per_sm=3)
copying = pytest.param(partial(default), id="tma")
SHORT = replace(SMALL, use_tma=False, split_weight=0.25)
ALONE = replace(SMALL, fills_alone=True)
loading = pytest.param(partial(default, config=SHORT), id="pointers")
torch_reference = pytest.param(reference.paged_decode_attention, id="torch")
in_c = pytest.param(launch.paged_decode_attention, id="c", marks=on_cpu)

both = pytest.mark.parametrize("attend", [copying, torch_reference, in_c])
every = pytest.mark.parametrize("attend", [copying, loading, torch_reference, in_c])
filling = pytest.param(partial(default, config=ALONE), id="filling")
kernels = pytest.mark.parametrize("attend", [copying, loading, filling])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    """Memory that a launcher takes holds NaN until it is written; counters go back to zero."""
    take = torch.empty

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        taken = take(*arguments, **options)
        return taken.fill_(float("nan")) if taken.is_floating_point() else taken

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert not arrivals(torch.zeros(1, device=device).device).any()


def make_padded(make_paged, context_lens: list[int], **options):
    """make_paged with rows of length 0, as a CUDA graph's padding: they have a table yet."""
    paged = make_paged([max(length, 1) for length in context_lens], stale=7.0, **options)
    paged.context_lens.copy_(torch.tensor(context_lens))
    return paged


def check(attend: Attend, paged, num_heads: int, **options) -> None:
    lens, dtype = paged.context_lens.tolist(), paged.kv_cache.dtype
    head_dim, device = paged.kv_cache.shape[-1], paged.kv_cache.device
    num_tokens = len(lens)
    # Queries as the model hands them over: a slice of the fused projection.
    fused = torch.randn(num_tokens, num_heads + 3, head_dim, device=device).to(dtype)
    q = fused[:, :num_heads]
    out = torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    arguments = q, paged.kv_cache, paged.block_tables, paged.context_lens, SCALE, out
    attend(*arguments, **options)
    # The weights of a row, which add up to 1, are rounded once, and the result is; what SDPA
    # rounds besides, one more time.
    atol = tolerance(dtype, 3, LARGEST_VALUE)
    for row, length in enumerate(lens):
        mine = slice(row, row + 1)
        expected = torch.zeros_like(q[mine])
        if length:
            expected = paged.expect(q[mine], row, SCALE, **options)
        torch.testing.assert_close(out[mine], expected, rtol=0, atol=atol)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_lengths_attend_to_exactly_their_own_context(
    attend: Attend, make_paged, dtype: torch.dtype
) -> None:
    paged = make_paged([37, 16, 1, 150], dtype=dtype, stale=7.0)
    check(attend, paged, num_heads=4)


@both
@pytest.mark.parametrize("group_size", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_group_of_query_heads_reads_its_own_kv_head(
    attend: Attend, make_paged, group_size: int
) -> None:
    paged = make_paged([21, 40], num_kv_heads=2, stale=7.0)
    check(attend, paged, num_heads=2 * group_size)


@both
@pytest.mark.parametrize(
    ("head_dim", "block_size"),  # threads load those of 1 and 7, the copy engine the others
    [(8, 16), (64, 1), (24, 7), (96, 32), (256, 16), (64, 128)],
)
def test_head_and_block_sizes_need_not_be_powers_of_two(
    attend: Attend, make_paged, head_dim: int, block_size: int
) -> None:
    paged = make_paged([block_size + 22, 9], head_dim=head_dim, block_size=block_size, stale=7.0)
    check(attend, paged, num_heads=4)


@kernels
def test_no_slot_past_a_context_is_used(attend: Attend, make_paged) -> None:
    paged = make_paged([1, 15, 16, 17, 31, 32, 33, 130])
    for row, length in enumerate(paged.context_lens.tolist()):
        paged.block_tables[row, -(-length // 16) :] = 0  # a block of NaN
    check(attend, paged, num_heads=4)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_the_default_tiles_stop_where_a_context_does(make_paged, block_size: int) -> None:
    lens = [64, 1, 129, 200, 63, 128]
    paged = make_paged(lens, num_kv_heads=1, block_size=block_size, dtype=torch.float16)
    check(default, paged, num_heads=2)


@both
def test_contexts_that_end_anywhere_in_a_tile_or_are_empty_are_padded(
    attend: Attend, make_paged
) -> None:
    check(attend, make_padded(make_paged, [1, 33, 0, 17, 50], block_size=32), 6)


@every
@pytest.mark.parametrize("window", [1, 50])
def test_a_window_hides_what_is_older(attend: Attend, make_paged, window: int) -> None:
    paged = make_paged([8, 33, 70, 66, 16], num_kv_heads=1, block_size=32, stale=7.0)
    check(attend, paged, 2, window=window)


@every
def test_blocks_that_a_window_has_left_behind_may_hold_anything(attend: Attend, make_paged) -> None:
    paged = make_paged([100, 70], dtype=torch.float16, stale=7.0)
    for row, length in enumerate(paged.context_lens.tolist()):
        left = (length - 20) // 16
        paged.kv_cache[paged.block_tables[row, :left]] = float("nan")
        paged.block_tables[row, :left] = 0
    check(attend, paged, 4, window=20)


@both
@pytest.mark.parametrize(("soft_cap", "window"), [(0.5, 0), (2.0, 20)])
def test_a_soft_cap_bounds_the_scores(
    attend: Attend, make_paged, soft_cap: float, window: int
) -> None:
    paged = make_paged([70, 5, 33], stale=7.0)
    check(attend, paged, 4, soft_cap=soft_cap, window=window)


@both
@pytest.mark.parametrize(("soft_cap", "window"), [(0.0, 0), (2.0, 20)])
def test_a_sink_takes_weight_and_has_no_value(
    attend: Attend, make_paged, soft_cap: float, window: int
) -> None:
    paged = make_padded(make_paged, [70, 0, 5, 33])
    sinks = torch.tensor([-200.0, 0.0, 3.0, 200.0], device=paged.kv_cache.device)
    check(attend, paged, 4, soft_cap=soft_cap, window=window, sinks=sinks)


@both
def test_padding_rows_are_zero_wherever_they_stand(attend: Attend, make_paged) -> None:
    check(attend, make_padded(make_paged, [0, 40, 0, 7, 0]), num_heads=2)
    check(attend, make_padded(make_paged, [0, 0]), num_heads=2)


@both
def test_an_empty_batch_is_nothing_to_do(attend: Attend, make_paged) -> None:
    check(attend, make_paged([]), num_heads=2)


@both
def test_lengths_far_apart_go_together(attend: Attend, make_paged) -> None:
    paged = make_padded(make_paged, [3, 250, 0, 97, 1, 33])
    check(attend, paged, num_heads=2)


@pytest.mark.parametrize("lens", [[40], [40, 33], [3, 350, 0, 97, 1], [0, 7]])
def test_the_twin_reads_a_narrower_pool_and_keeps_a_plan(make_paged, lens: list[int]) -> None:
    paged = make_padded(make_paged, lens, dtype=torch.bfloat16)
    q = torch.randn(len(lens), 4, paged.kv_cache.shape[-1])
    arguments = paged.kv_cache, paged.block_tables, paged.context_lens
    plan = reference.plan_decode(*arguments, q.shape[1] // paged.kv_cache.shape[2])
    planned, alone = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    for _ in range(2):
        reference.paged_decode_attention(q, *arguments, SCALE, planned, plan=plan)
    reference.paged_decode_attention(q, *arguments, SCALE, alone)
    assert torch.equal(planned, alone)
    atol = tolerance(q.dtype, 3, LARGEST_VALUE)
    for row, length in enumerate(lens):
        expected = torch.zeros_like(q[row : row + 1])
        if length:
            expected = paged.expect(q[row : row + 1], row, SCALE)
        torch.testing.assert_close(planned[row : row + 1], expected, rtol=0, atol=atol)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many sequences are planned at a time."""
    if architecture() != INTERPRETED:  # a build keeps the number that it was made with
        return int(decode_kernel.LANES.value)
    monkeypatch.setattr(decode_kernel, "LANES", tl.constexpr(16))
    return 16


def test_more_sequences_than_are_planned_at_a_time(make_paged, lanes: int) -> None:
    lens = [1 + i % 3 for i in range(lanes - 1)] + [40, 0, 35, 2]
    paged = make_padded(make_paged, lens, num_kv_heads=1)
    check(partial(default, config=SMALL), paged, num_heads=1)


@kernels
def test_a_sequence_gets_the_same_bits_in_every_batch(attend: Attend, make_paged) -> None:
    paged = make_paged([40, 5, 100, 33], num_kv_heads=1, dtype=DTYPES[-1])
    q = torch.randn(4, 2, 16, device=paged.kv_cache.device).to(DTYPES[-1])

    def attended(rows: list[int], width: int) -> torch.Tensor:
        out = torch.full_like(q[rows], float("nan"))
        tables = paged.block_tables[rows][:, :width].contiguous()
        attend(q[rows], paged.kv_cache, tables, paged.context_lens[rows], SCALE, out)
        return out

    together = attended([0, 1, 2, 3], 7)
    assert torch.equal(attended([3, 2, 1, 0], 7).flip(0), together)
    for row, width in enumerate([3, 1, 7]):
        assert torch.equal(attended([row], width)[0], together[row])


@pytest.mark.parametrize(("num_multiprocessors", "width"), [(1, 0), (9, 500), (40, 0)])
def test_one_sequence_alone_fills_the_chip(
    make_paged, monkeypatch: pytest.MonkeyPatch, num_multiprocessors: int, width: int
) -> None:
    """As far as it has tiles, and by its length, not by the room in its table."""
    monkeypatch.setattr(paged_attention, "num_multiprocessors", lambda _: num_multiprocessors)
    num_tiles, num_kv_heads = 12, 2
    paged = make_paged([num_tiles * 16], num_kv_heads=num_kv_heads)
    paged.block_tables = torch.nn.functional.pad(paged.block_tables, (0, width))
    written = []

    def take(*arguments: Any, **options: Any) -> torch.Tensor:
        written.append(poisoned(*arguments, **options))
        return written[-1]

    poisoned = torch.empty
    with monkeypatch.context() as patch:  # undone before the poison is
        patch.setattr(torch, "empty", take)
        check(partial(default, config=ALONE), paged, num_heads=4)
    # a split's row of partial sums of each query head, NaN where there is no split
    [partials] = [each for each in written if each.ndim == 3 and len(each) > 1]
    num_splits = int((~partials[:, 0, 0].isnan()).sum())
    assert num_splits >= min(num_multiprocessors, num_tiles * num_kv_heads)
    assert num_splits <= max(2 * num_multiprocessors, 3 * num_kv_heads)


def share(paged, heads: dict[int, tuple[int, int]]) -> None:
    """Let sequences begin with the blocks of another: (sequence |-> (the other, its blocks))."""
    block_size = paged.kv_cache.shape[3]
    for row, (other, count) in heads.items():
        paged.kv_cache[paged.block_tables[row, :count]] = float("nan")
        paged.block_tables[row, :count] = paged.block_tables[other, :count]
        for kept in (paged.keys, paged.values):
            kept[row][: count * block_size] = kept[other][: count * block_size]


def attend_by_prefixes(
    q, kv_cache, block_tables, context_lens, scale, out, *, config=None, **options
) -> None:
    group_size = q.shape[1] // kv_cache.shape[2]
    where = kv_cache, block_tables, context_lens
    prefixes = paged_attention.plan_prefixes(*where, group_size, config)
    assert prefixes is not None and prefixes.counts.any()
    default(q, *where, scale, out, prefixes=prefixes, config=config, **options)


prefix_configs = pytest.mark.parametrize(
    "config",
    [
        pytest.param(None, id="default"),
        pytest.param(SHORT, id="pointers", marks=pytest.mark.slow),
        pytest.param(SMALL, id="tma", marks=pytest.mark.slow),
        pytest.param(ALONE, id="filling", marks=pytest.mark.slow),
    ],
)


@prefix_configs
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_read_shared_blocks_together(
    make_paged, config: PagedAttentionConfig | None, dtype: torch.dtype
) -> None:
    lens = [200, 70, 260, 0, 150, 199, 97, 33, 258]
    paged = make_padded(make_paged, lens, num_kv_heads=1, dtype=dtype)
    share(paged, {2: (0, 8), 4: (0, 8), 5: (0, 12), 6: (1, 4), 8: (2, 16)})
    check(partial(attend_by_prefixes, config=config), paged, num_heads=4)


@prefix_configs
@pytest.mark.parametrize(
    "group_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))]
)
def test_rows_of_a_prefix_are_the_query_heads_of_several_sequences(
    make_paged, config: PagedAttentionConfig | None, group_size: int
) -> None:
    paged = make_paged([70, 66, 80, 69, 130, 75, 67], stale=7.0)
    share(paged, dict.fromkeys(range(1, 7), (0, 4)))
    check(partial(attend_by_prefixes, config=config), paged, num_heads=2 * group_size)


@pytest.mark.parametrize("block_size", [7, 64, 128])
def test_a_shared_prefix_ends_where_a_block_and_a_tile_do(make_paged, block_size: int) -> None:
    count = -(-150 // block_size)
    lens = [count * block_size + more for more in (1, 40, 90)]
    paged = make_paged(lens, block_size=block_size, dtype=torch.float16)
    share(paged, {1: (0, count), 2: (0, count)})
    check(attend_by_prefixes, paged, num_heads=4)


@prefix_configs
def test_caps_and_sinks_apply_to_shared_prefixes(
    make_paged, config: PagedAttentionConfig | None
) -> None:
    paged = make_padded(make_paged, [70, 0, 85, 133])
    share(paged, {2: (0, 4), 3: (0, 4)})
    sinks = torch.tensor([-200.0, 0.0, 3.0, 200.0], device=paged.kv_cache.device)
    check(partial(attend_by_prefixes, config=config), paged, 4, soft_cap=2.0, sinks=sinks)


@prefix_configs
def test_sequences_that_share_nothing_get_the_bits_of_plain_attention(
    make_paged, config: PagedAttentionConfig | None
) -> None:
    paged = make_padded(make_paged, [40, 0, 100, 33], num_kv_heads=1)
    q = torch.randn(4, 2, 16, device=paged.kv_cache.device)
    where = paged.kv_cache, paged.block_tables, paged.context_lens
    plain, out = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    default(q, *where, SCALE, plain, config=config)
    prefixes = paged_attention.plan_prefixes(*where, 2, config)
    default(q, *where, SCALE, out, prefixes=prefixes, config=config)
    assert torch.equal(out, plain)


def test_prefixes_of_more_sequences_than_are_planned_at_a_time(make_paged, lanes: int) -> None:
    lens = [17 + row % 5 for row in range(lanes + 4)]
    paged = make_paged(lens, num_kv_heads=1, stale=7.0)
    share(paged, {row: (row % 3, 1) for row in range(3, len(lens))})
    check(partial(attend_by_prefixes, config=SMALL), paged, num_heads=4)


def test_one_sequence_and_many_heads_of_a_sequence_share_nothing(make_paged) -> None:
    paged = make_paged([40, 40], num_kv_heads=1)
    where = paged.kv_cache, paged.block_tables, paged.context_lens
    alone = paged.kv_cache, paged.block_tables[:1], paged.context_lens[:1]
    assert paged_attention.plan_prefixes(*alone, 1) is None
    assert paged_attention.plan_prefixes(*where, 9) is None
    assert paged_attention.plan_prefixes(*where, 8) is not None


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_every_shape_has_configurations_to_measure(arch: int, block_size: int) -> None:
    for head_dim in (64, 96, 128, 256):
        found = list(paged_attention.candidates(head_dim, 4, 2, block_size, arch))
        assert 2 <= len(found) <= 60
        assert any(config.use_tma for config in found) == (arch >= 90 and block_size >= 64)
