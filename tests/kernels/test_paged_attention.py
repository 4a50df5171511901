"""Decode attention: the Triton kernel and its PyTorch twin against dense attention in float64."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels import paged_attention, reference

# float16 keeps 11 bits, bfloat16 8: scores and weights are rounded to them once each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.31

launchers = pytest.mark.parametrize(
    "attend",
    [
        pytest.param(paged_attention.paged_decode_attention, id="triton"),
        pytest.param(reference.paged_decode_attention, id="torch"),
    ],
)


def check(attend, paged, num_heads: int) -> None:
    num_seqs, dtype = len(paged.keys), paged.kv_cache.dtype
    head_dim, device = paged.kv_cache.shape[-1], paged.kv_cache.device
    # Queries as the model hands them over: a slice of the fused projection.
    fused = torch.randn(num_seqs, num_heads + 3, head_dim, device=device).to(dtype)
    q = fused[:, :num_heads]
    out = torch.full((num_seqs, num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    attend(q, paged.kv_cache, paged.block_tables, paged.context_lens, SCALE, out)
    for row in range(num_seqs):
        expected = paged.expect(q[row : row + 1], row, SCALE)[0]
        torch.testing.assert_close(out[row], expected, rtol=0, atol=TOLERANCE[dtype])


@launchers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_odd_lengths_attend_to_exactly_their_own_context(
    attend: Callable[..., None], make_paged, dtype: torch.dtype
) -> None:
    paged = make_paged([37, 16, 65, 1, 50], dtype=dtype, stale=7.0)
    check(attend, paged, num_heads=4)


@launchers
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8])
def test_every_group_of_query_heads_reads_its_own_kv_head(
    attend: Callable[..., None], make_paged, group_size: int
) -> None:
    check(attend, make_paged([21, 40], num_kv_heads=2, stale=7.0), num_heads=2 * group_size)


@launchers
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(8, 16), (24, 16), (64, 1), (16, 7), (128, 32)]
)
def test_head_and_block_sizes_need_not_be_powers_of_two(
    attend: Callable[..., None], make_paged, head_dim: int, block_size: int
) -> None:
    paged = make_paged([19, 9], head_dim=head_dim, block_size=block_size, stale=7.0)
    check(attend, paged, num_heads=4)


@launchers
@pytest.mark.parametrize("context_len", [1, 15, 16, 17, 130])
def test_a_lone_sequence_never_touches_a_slot_past_its_context(
    attend: Callable[..., None], make_paged, context_len: int
) -> None:
    check(attend, make_paged([context_len]), num_heads=2)


def test_the_kernel_never_touches_a_slot_past_any_context(make_paged) -> None:
    check(paged_attention.paged_decode_attention, make_paged([33, 5, 70]), num_heads=4)


@launchers
def test_lengths_far_apart_are_bucketed_without_changing_rows(
    attend: Callable[..., None], make_paged
) -> None:
    paged = make_paged([3, 150, 2, 5, 97, 4, 1, 33], stale=7.0)
    check(attend, paged, num_heads=2)


@launchers
def test_an_empty_batch_is_nothing_to_do(attend: Callable[..., None], make_paged) -> None:
    check(attend, make_paged([]), num_heads=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's bf16 dot is wrong")
def test_bfloat16_agrees_on_a_gpu(make_paged) -> None:
    paged = make_paged([300, 1, 77], head_dim=128, dtype=torch.bfloat16)
    check(paged_attention.paged_decode_attention, paged, num_heads=8)
