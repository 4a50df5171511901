"""Prefill attention: the Triton kernel and the PyTorch reference against attention in float64."""

from collections.abc import Callable

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.kernels.attention import prefill as prefill_attention
from tandem.kernels.attention import prefill_hopper as prefill_attention_hopper
from tandem.kernels.attention.prefill import BLOCKS_OF_64, PrefillAttentionConfig, candidates
from tandem.kernels.cpu import launch
from tandem.kernels.reference import prefill_attention as reference
from tandem.kernels.tuned import INTERPRETED, architecture
from tests.kernels.tolerance import DTYPES, launchers, tolerance, unlike

SCALE = 0.27

kinds = launchers(
    "attend",
    prefill_attention.prefill_attention,
    reference.prefill_attention,
    launch.prefill_attention,
)
# Tiles small enough for tiny prompts to take several, by every way to fetch and to take turns.
configs = pytest.mark.parametrize(
    "config",
    [
        PrefillAttentionConfig(32, 16, 4, 3, use_tma=False, persistent=False),
        PrefillAttentionConfig(64, 32, 4, 3, use_tma=True, persistent=True),
    ],
    ids=["by threads, a program per tile", "by the copy engine, in turns"],
)
# Weights are rounded before they meet the values, of up to 4 or so, and sums before they are stored
# (the reference rounds its scores as well).
ROUNDINGS, MAGNITUDE = 2, 4.0


def check(
    attend: Callable[..., None],
    paged,
    query_lens: list[int],
    num_heads: int,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    config: PrefillAttentionConfig | None = None,
) -> None:
    dtype, device = paged.kv_cache.dtype, paged.kv_cache.device
    head_dim = paged.kv_cache.shape[-1]
    starts = [sum(query_lens[:row]) for row in range(len(query_lens) + 1)]
    fused = torch.randn(starts[-1], num_heads + 3, head_dim, device=device).to(dtype)
    q = fused[:, :num_heads]
    out = torch.full((starts[-1], num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    configured = {"config": config} if attend is prefill_attention.prefill_attention else {}
    attend(
        q,
        paged.kv_cache,
        paged.block_tables,
        torch.tensor(starts, device=device),
        paged.context_lens,
        max(query_lens, default=0),
        SCALE,
        out,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
        **configured,
    )
    for row in range(len(query_lens)):
        mine = slice(starts[row], starts[row + 1])
        expected = paged.expect(q[mine], row, SCALE, soft_cap=soft_cap, window=window, sinks=sinks)
        atol = tolerance(dtype, ROUNDINGS, MAGNITUDE)
        torch.testing.assert_close(out[mine], expected, rtol=0, atol=atol)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_prompts_of_odd_lengths_are_causal(
    attend: Callable[..., None], make_paged, dtype: torch.dtype
) -> None:
    lens = [37, 1, 16, 70]
    check(attend, make_paged(lens, 1, dtype=dtype), lens, num_heads=2)


@kinds
def test_a_later_chunk_sees_everything_before_it(attend: Callable[..., None], make_paged) -> None:
    check(attend, make_paged([100, 33, 130, 18], 1), [20, 32, 1, 2], num_heads=2)


@kinds
@pytest.mark.parametrize("group_size", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_group_of_query_heads_reads_its_own_kv_head(
    attend: Callable[..., None], make_paged, group_size: int
) -> None:
    check(attend, make_paged([40, 21]), [11, 13], num_heads=2 * group_size)


@kinds
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(8, 16), (64, 1), (24, 7), (96, 64), (256, 128)],
)
def test_head_and_block_sizes_need_not_be_powers_of_two(
    attend: Callable[..., None], make_paged, head_dim: int, block_size: int
) -> None:
    paged = make_paged([19, 9], head_dim=head_dim, block_size=block_size)
    check(attend, paged, [6, 9], num_heads=2)


@configs
@pytest.mark.parametrize("block_size", [24, 64])
def test_every_way_to_fetch_and_to_take_turns_gives_the_same(
    config: PrefillAttentionConfig, make_paged, block_size: int
) -> None:
    lens, dtype = [32, 33, 100, 7], DTYPES[-1]
    paged = make_paged(lens, 1, block_size=block_size, dtype=dtype, head_dim=24)
    attend = prefill_attention.prefill_attention
    check(attend, paged, [32, 1, 50, 7], num_heads=3, config=config)


@pytest.mark.parametrize(("head_dim", "window"), [(128, 0), (96, 70)])
def test_the_copy_engine_loads_blocks_of_64_whole(
    make_paged, monkeypatch: pytest.MonkeyPatch, head_dim: int, window: int
) -> None:
    dtype = DTYPES[-1]
    loads = []

    def describe(*arguments: object) -> TensorDescriptor:
        loads.append(arguments)
        return TensorDescriptor(*arguments)

    monkeypatch.setattr(prefill_attention, "TensorDescriptor", describe)
    paged = make_paged([200, 64, 129], 1, head_dim, 64, dtype=dtype)
    attend = prefill_attention.prefill_attention
    check(attend, paged, [137, 64, 1], num_heads=2, window=window, config=BLOCKS_OF_64)
    assert len(loads) == 1
    check(attend, make_paged([40], 1, dtype=dtype), [7], num_heads=2, config=BLOCKS_OF_64)
    assert len(loads) == 1  # blocks of 16 are loaded by threads


@kinds
@pytest.mark.parametrize("window", [1, 33])
def test_a_window_hides_what_lies_further_back(
    attend: Callable[..., None], make_paged, window: int
) -> None:
    check(attend, make_paged([80, 18], 1), [40, 2], num_heads=2, window=window)


@kinds
def test_blocks_that_the_window_has_passed_may_hold_anything(
    attend: Callable[..., None], make_paged
) -> None:
    """They are other sequences' by now. A tile may begin before the window does."""
    config = PrefillAttentionConfig(32, 64, 4, 3, use_tma=False, persistent=False)
    paged, query_lens, block_size = make_paged([100, 71]), [10, 1], 16
    for row, length in enumerate(paged.context_lens.tolist()):
        passed = (length - query_lens[row] + 1 - 20) // block_size
        assert passed > 0
        paged.kv_cache[paged.block_tables[row, :passed]] = float("nan")
        paged.block_tables[row, :passed] = 0
    check(attend, paged, query_lens, num_heads=4, window=20, config=config)


@configs
def test_windows_begin_and_end_anywhere_in_a_tile(
    config: PrefillAttentionConfig, make_paged
) -> None:
    attend = prefill_attention.prefill_attention
    check(attend, make_paged([90, 20], 1), [41, 20], num_heads=2, window=21, config=config)


@kinds
@pytest.mark.parametrize("window", [0, 20])
def test_a_soft_cap_bends_the_scores(attend: Callable[..., None], make_paged, window: int) -> None:
    check(attend, make_paged([50, 8], 1), [30, 8], num_heads=2, soft_cap=1.5, window=window)


@kinds
@pytest.mark.parametrize(("soft_cap", "window"), [(0.0, 0), (1.5, 20)])
def test_a_sink_takes_weight_and_has_no_value(
    attend: Callable[..., None], make_paged, soft_cap: float, window: int
) -> None:
    paged = make_paged([40, 8])
    sinks = torch.tensor([-200.0, 0.0, 3.0, 200.0], device=paged.kv_cache.device)
    check(attend, paged, [20, 8], 4, soft_cap=soft_cap, window=window, sinks=sinks)


@kinds
def test_a_prompt_longer_than_every_tile_is_attended_whole(
    attend: Callable[..., None], make_paged
) -> None:
    check(attend, make_paged([300], 1, dtype=DTYPES[-1]), [160], num_heads=2)


@kinds
def test_an_empty_batch_is_nothing_to_do(attend: Callable[..., None], make_paged) -> None:
    check(attend, make_paged([]), [], num_heads=2)


@kinds
def test_sequences_without_queries_leave_the_others_alone(
    attend: Callable[..., None], make_paged
) -> None:
    check(attend, make_paged([9, 12, 20, 5, 3]), [0, 12, 0, 5, 0], num_heads=2)


@configs
def test_many_short_prompts_share_few_programs(config: PrefillAttentionConfig, make_paged) -> None:
    lens = [5, 1, 22, 16, 9, 40, 3]
    paged = make_paged(lens, 1)
    check(prefill_attention.prefill_attention, paged, lens, num_heads=2, config=config)


@configs
def test_a_sequence_has_the_same_result_to_the_bit_in_any_batch(
    config: PrefillAttentionConfig, make_paged
) -> None:
    paged = make_paged([50, 37, 20], 1)
    starts = torch.tensor([0, 50, 70, 90], device=paged.kv_cache.device)
    q = torch.randn(90, 2, 16, device=paged.kv_cache.device)
    together, alone = torch.full_like(q, float("nan")), torch.full_like(q[50:70], float("nan"))
    tables, lens = paged.block_tables, paged.context_lens
    attend = prefill_attention.prefill_attention
    attend(q, paged.kv_cache, tables, starts, lens, 50, SCALE, together, config=config)
    attend(
        q[50:70],
        paged.kv_cache,
        tables[1:2],
        starts[1:3] - 50,
        lens[1:2],
        20,
        SCALE,
        alone,
        config=config,
    )
    assert torch.equal(together[50:70], alone)


def test_a_head_has_the_same_bits_beside_any_number_of_others(make_paged) -> None:
    """As ranks ask for it, each of which has some of the heads of a KV head."""
    paged = make_paged([50], 1)
    starts = torch.tensor([0, 50], device=paged.kv_cache.device)
    q = torch.randn(50, 13, 16, device=paged.kv_cache.device)

    def attended(heads: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(heads, float("nan"))
        cache, tables, lens = paged.kv_cache, paged.block_tables, paged.context_lens
        launch.prefill_attention(heads, cache, tables, starts, lens, 50, SCALE, out)
        return out

    together = attended(q)
    for num_heads in range(1, 13):
        assert torch.equal(attended(q[:, :num_heads].contiguous()), together[:, :num_heads])


@configs
def test_table_entries_past_a_context_are_never_followed(
    config: PrefillAttentionConfig, make_paged
) -> None:
    paged = make_paged([40, 3])
    paged.block_tables[1, 1:] = 2**40
    check(prefill_attention.prefill_attention, paged, [9, 3], num_heads=4, config=config)


def test_narrow_integers_and_surplus_rows_are_taken(make_paged) -> None:
    paged = make_paged([40, 21], 1)
    device = paged.kv_cache.device
    q = torch.randn(40, 2, 16, device=device)
    out = torch.full_like(q, 7.0)
    prefill_attention.prefill_attention(
        q,
        paged.kv_cache,
        paged.block_tables.int(),
        torch.tensor([0, 10, 31], dtype=torch.int32, device=device),
        paged.context_lens.int(),
        21,
        SCALE,
        out,
    )
    expected = torch.cat([paged.expect(q[:10], 0, SCALE), paged.expect(q[10:31], 1, SCALE)])
    atol = tolerance(q.dtype, ROUNDINGS, MAGNITUDE)
    torch.testing.assert_close(out[:31], expected, rtol=0, atol=atol)
    assert (out[31:] == 7.0).all()


@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 16), (64, 128)])
def test_every_candidate_gives_the_same(make_paged, head_dim: int, block_size: int) -> None:
    arch = 90 if architecture() == INTERPRETED else architecture()
    paged = make_paged([140], 1, head_dim, block_size, dtype=torch.float16)
    found = list(candidates(head_dim, 2, block_size, arch))
    assert 10 <= len(found) <= 60 and len(set(found)) == len(found)
    for config in unlike(found):
        check(prefill_attention.prefill_attention, paged, [133], num_heads=1, config=config)


@pytest.mark.parametrize(
    ("head_dim", "options", "expected"),
    [(64, {}, 1), (64, {"window": 5}, 0), (64, {"soft_cap": 2.0}, 0), (24, {}, 0)],
)
def test_the_warp_specialised_kernel_gets_what_it_offers_to_take_and_nothing_else(
    make_paged, monkeypatch: pytest.MonkeyPatch, head_dim: int, options: dict, expected: int
) -> None:
    launches = []

    def launch(*arguments: object) -> None:
        launches.append(arguments)
        prefill_attention.prefill_attention(*arguments)

    monkeypatch.setattr(prefill_attention_hopper, "prefill_attention_hopper", launch)
    paged = make_paged([40, 9], head_dim=head_dim, dtype=torch.float16)
    config = PrefillAttentionConfig(
        32, 16, 4, 3, use_tma=False, persistent=False, warp_specialized=True
    )
    attend = prefill_attention.prefill_attention
    check(attend, paged, [30, 9], num_heads=4, config=config, **options)
    assert len(launches) == expected
