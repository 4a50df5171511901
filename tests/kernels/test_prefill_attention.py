"""Prefill attention: the Triton kernel and its PyTorch twin against dense attention in float64."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels import prefill_attention, reference

# float16 keeps 11 bits, bfloat16 8: scores and weights are rounded to them once each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.27

launchers = pytest.mark.parametrize(
    "attend",
    [
        pytest.param(prefill_attention.prefill_attention, id="triton"),
        pytest.param(reference.prefill_attention, id="torch"),
    ],
)


def check(attend, paged, query_lens: list[int], num_heads: int) -> None:
    dtype, device = paged.kv_cache.dtype, paged.kv_cache.device
    head_dim = paged.kv_cache.shape[-1]
    starts = [sum(query_lens[:row]) for row in range(len(query_lens) + 1)]
    fused = torch.randn(starts[-1], num_heads + 3, head_dim, device=device).to(dtype)
    q = fused[:, :num_heads]
    out = torch.full((starts[-1], num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    cu_seqlens = torch.tensor(starts, device=device)
    longest = max(query_lens, default=0)
    attend(
        q, paged.kv_cache, paged.block_tables, cu_seqlens, paged.context_lens, longest, SCALE, out
    )
    for row in range(len(query_lens)):
        mine = slice(starts[row], starts[row + 1])
        expected = paged.expect(q[mine], row, SCALE)
        torch.testing.assert_close(out[mine], expected, rtol=0, atol=TOLERANCE[dtype])


@launchers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_whole_prompts_of_odd_lengths_are_causal(
    attend: Callable[..., None], make_paged, dtype: torch.dtype
) -> None:
    lens = [37, 1, 16, 70]
    check(attend, make_paged(lens, dtype=dtype), lens, num_heads=4)


@launchers
def test_a_later_chunk_sees_everything_before_it(attend: Callable[..., None], make_paged) -> None:
    check(attend, make_paged([100, 33, 130, 18]), [20, 32, 1, 2], num_heads=4)


@launchers
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8])
def test_every_group_of_query_heads_reads_its_own_kv_head(
    attend: Callable[..., None], make_paged, group_size: int
) -> None:
    check(attend, make_paged([40, 21]), [21, 13], num_heads=2 * group_size)


@launchers
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(8, 16), (24, 16), (64, 1), (16, 7), (128, 32)]
)
def test_head_and_block_sizes_need_not_be_powers_of_two(
    attend: Callable[..., None], make_paged, head_dim: int, block_size: int
) -> None:
    paged = make_paged([19, 9], head_dim=head_dim, block_size=block_size)
    check(attend, paged, [6, 9], num_heads=2)


@launchers
def test_a_prompt_longer_than_every_tile_is_attended_whole(
    attend: Callable[..., None], make_paged
) -> None:
    check(attend, make_paged([200], num_kv_heads=1), [160], num_heads=2)


@launchers
def test_an_empty_batch_is_nothing_to_do(attend: Callable[..., None], make_paged) -> None:
    check(attend, make_paged([]), [], num_heads=2)


@launchers
def test_a_sequence_without_queries_leaves_the_others_alone(
    attend: Callable[..., None], make_paged
) -> None:
    check(attend, make_paged([12, 20, 5]), [12, 0, 5], num_heads=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's bf16 dot is wrong")
def test_bfloat16_agrees_on_a_gpu(make_paged) -> None:
    paged = make_paged([300, 1, 77], head_dim=128, dtype=torch.bfloat16)
    check(prefill_attention.prefill_attention, paged, [200, 1, 77], num_heads=8)
