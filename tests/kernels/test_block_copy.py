"""Gathering and scattering blocks: bit for bit, and nothing but the named heads of the named."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.kernels import block_copy
from tandem.kernels.block_copy import BlockCopyConfig
from tandem.kernels.reference import block_copy as reference

# Many programs per block, the last one not full.
SMALL = BlockCopyConfig(tile_bytes=256, num_warps=1)

Copy = Callable[..., None]
launchers = pytest.mark.parametrize(
    ("gather", "scatter"),
    [
        pytest.param(
            partial(block_copy.gather_blocks, config=SMALL),
            partial(block_copy.scatter_blocks, config=SMALL),
            id="triton",
        ),
        pytest.param(reference.gather_blocks, reference.scatter_blocks, id="torch"),
    ],
)
shapes = pytest.mark.parametrize(
    ("shape", "first_head", "num_heads"),
    [
        pytest.param((5, 2, 2, 4, 4, 16), 0, 4, id="whole blocks"),
        pytest.param((5, 2, 2, 4, 4, 16), 0, 1, id="the first head"),
        pytest.param((5, 2, 2, 4, 4, 16), 3, 1, id="the last head"),
        pytest.param((5, 3, 2, 8, 2, 8), 2, 4, id="heads in the middle"),
        pytest.param((4, 3, 2, 5, 7, 24), 1, 3, id="nothing a power of two"),
        pytest.param((4, 1, 2, 1, 1, 8), 0, 1, id="one token of one head of one layer"),
    ],
)
IDS = [3, -1, 0, 2]


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Any bits, those of NaNs among them."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(num_bytes)
    raw = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape).to(device)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@launchers
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_named_heads_of_named_blocks_move_and_no_other_bit_changes(
    gather: Copy,
    scatter: Copy,
    device: str,
    shape: tuple[int, ...],
    first_head: int,
    num_heads: int,
    dtype: torch.dtype,
) -> None:
    if isinstance(gather, partial) and shape[4] * shape[5] * dtype.itemsize % 16:
        pytest.skip("the kernel moves whole 16-byte words")
    pool = noise(shape, dtype, device)
    ids = torch.tensor(IDS, device=device)
    staging = torch.full((4, *shape[1:3], num_heads, *shape[4:]), -3.0, device=device).to(dtype)
    expected = staging.clone()
    heads = slice(first_head, first_head + num_heads)
    for row, block in enumerate(IDS):
        if block >= 0:
            expected[row] = pool[block, :, :, heads]
    gather(pool, ids, staging, first_head=first_head)
    assert same_bits(staging, expected)

    target = torch.full(shape, -7.0, device=device).to(dtype)
    expected = target.clone()
    for row, block in enumerate(IDS):
        if block >= 0:
            expected[block, :, :, heads] = staging[row]
    scatter(staging, target, ids, first_head=first_head)
    assert same_bits(target, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_block_may_be_gathered_twice_and_ids_be_of_any_width(
    device: str, dtype: torch.dtype
) -> None:
    pool = noise((3, 2, 2, 2, 4, 8), torch.float16, device)
    ids = torch.tensor([1, 1, 2], dtype=dtype, device=device)
    staging = torch.zeros_like(pool)
    block_copy.gather_blocks(pool, ids, staging)
    assert same_bits(staging, pool[[1, 1, 2]])


@launchers
def test_no_blocks_are_nothing_to_do(gather: Copy, scatter: Copy, device: str) -> None:
    pool = noise((3, 2, 2, 2, 4, 8), torch.float16, device)
    before, ids = pool.clone(), torch.empty(0, dtype=torch.int64, device=device)
    gather(pool, ids, pool[:0])
    scatter(pool[:0], pool, ids)
    assert same_bits(pool, before)


@pytest.mark.parametrize("config", list(block_copy.candidates()))
def test_every_candidate_copies_the_same(device: str, config: BlockCopyConfig) -> None:
    pool = noise((2, 3, 2, 3, 5, 64), torch.float16, device)
    ids = torch.tensor([1], device=device)
    staging = torch.zeros(1, 3, 2, 2, 5, 64, dtype=torch.float16, device=device)
    block_copy.gather_blocks(pool, ids, staging, first_head=1, config=config)
    assert same_bits(staging, pool[1:, :, :, 1:])


def test_a_block_further_than_two_to_the_31_words_into_the_pool_is_copied(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a sparse file is host memory")
    # A sparse file: only what is touched takes memory.
    num_words = 2**31 + 2**9
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=num_words, dtype=torch.int64)
    pool = pool.view(-1, 1, 2, 2, 4, 16)
    staging = noise((1, 1, 2, 2, 4, 16), torch.int64, "cpu")
    ids = torch.tensor([len(pool) - 1])
    block_copy.scatter_blocks(staging, pool, ids)
    assert torch.equal(pool[-1], staging[0])
    assert not pool[:2].any()
    found = torch.zeros_like(staging)
    block_copy.gather_blocks(pool, ids, found)
    assert torch.equal(found, staging)


def test_heads_that_are_not_whole_vectors_are_refused(device: str) -> None:
    pool = torch.zeros(2, 1, 2, 2, 1, 6, dtype=torch.float16, device=device)
    with pytest.raises(AssertionError):
        block_copy.gather_blocks(pool, torch.tensor([0], device=device), pool[:1].clone())
