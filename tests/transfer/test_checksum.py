from collections.abc import Callable, Sequence

import pytest
import torch
import xxhash

from tandem.transfer.checksum import block_checksums, checksum_name, mix64

Checksums = Callable[[torch.Tensor, Sequence[int]], list[int]]
BOTH = pytest.mark.parametrize("checksums", [block_checksums, mix64])
POOL_SHAPE = (5, 2, 2, 2, 4, 8)


def pool(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(POOL_SHAPE, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_host_memory_is_summed_by_xxh3_over_its_raw_bytes(dtype: torch.dtype) -> None:
    blocks = pool(dtype)
    raw = [bytes(blocks[i].contiguous().flatten().view(torch.uint8).tolist()) for i in (3, 0)]
    assert block_checksums(blocks, [3, 0]) == [xxhash.xxh3_64_intdigest(data) for data in raw]
    assert checksum_name("DRAM") == "xxh3"


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_flip_changes_the_checksum_of_its_block_only(
    checksums: Checksums, dtype: torch.dtype
) -> None:
    blocks = pool(dtype)
    before = checksums(blocks, range(5))
    assert all(0 <= value < 2**64 for value in before)
    raw = blocks.view(5, -1).view(torch.uint8)
    for position in range(0, raw.shape[1], 37):
        raw[2, position] ^= 1 << (position % 8)
        after = checksums(blocks, range(5))
        assert [a == b for a, b in zip(after, before, strict=True)] == [True, True, False] + [
            True
        ] * 2
        raw[2, position] ^= 1 << (position % 8)


@BOTH
def test_swapped_words_and_zero_blocks_of_another_length_differ(checksums: Checksums) -> None:
    blocks = pool(torch.float32)
    swapped = blocks.clone()
    flat = swapped.view(5, -1)
    flat[:, [0, 1]] = flat[:, [1, 0]]
    assert not set(checksums(blocks, range(5))) & set(checksums(swapped, range(5)))
    assert checksums(torch.zeros(1, 4), [0]) != checksums(torch.zeros(1, 5), [0])


@BOTH
def test_the_order_and_repetition_of_ids_is_kept(checksums: Checksums) -> None:
    a, b = checksums(pool(torch.float32), [1, 4])
    assert checksums(pool(torch.float32), [4, 1, 4]) == [b, a, b]
    assert block_checksums(pool(torch.float32), []) == []
