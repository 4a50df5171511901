"""Checksums of parts of blocks: over their bytes, of nothing else, and never of other blocks."""

import random

import pytest
import torch
import xxhash

from tandem.runtime.errors import TransferError
from tandem.transfer.checksum import checksum_name, part_checksums
from tandem.transfer.layout import ChecksumName
from tandem.transfer.transport import Parts

NUM_BLOCKS = 5
POOL_SHAPE = (NUM_BLOCKS, 2, 2, 2, 4, 8)  # blocks of 1 KiB in float32

BOTH = pytest.mark.parametrize("name", ["xxh3", "mix64"])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def pool(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(POOL_SHAPE, generator=generator).to(dtype)


def whole(blocks: torch.Tensor) -> Parts:
    return ((0, blocks[0].nbytes),)


def test_the_function_follows_the_memory_and_verification_can_be_off() -> None:
    assert [checksum_name("DRAM"), checksum_name("VRAM")] == ["xxh3", "mix64"]
    assert {checksum_name("DRAM", verify=False), checksum_name("VRAM", False)} == {"none"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [((0, 512),), ((3, 17),), ((256, 100), (7, 1), (10, 200))])
def test_host_memory_is_summed_by_xxh3_over_the_raw_bytes_of_the_parts(
    dtype: torch.dtype, parts: Parts
) -> None:
    blocks = pool(dtype)
    raw = [bytes(block.flatten().view(torch.uint8).tolist()) for block in blocks]
    covered = [b"".join(data[at : at + length] for at, length in parts) for data in raw]
    expected = [xxhash.xxh3_64_intdigest(covered[block]) for block in (3, 0)]
    assert part_checksums(blocks, [3, 0], parts, "xxh3") == expected


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_flip_changes_the_checksum_of_its_block_only(
    name: ChecksumName, dtype: torch.dtype
) -> None:
    blocks = pool(dtype)
    raw = blocks.view(NUM_BLOCKS, -1).view(torch.uint8)
    parts = ((8, 100), (256, 64))
    covered = {byte for at, length in parts for byte in range(at, at + length)}
    before = part_checksums(blocks, range(NUM_BLOCKS), parts, name)
    assert all(0 <= value < 2**64 for value in before)
    for byte in range(0, raw.shape[1], 7):
        raw[2, byte] ^= 1 << (byte % 8)
        after = part_checksums(blocks, range(NUM_BLOCKS), parts, name)
        raw[2, byte] ^= 1 << (byte % 8)
        changed = [block for block in range(NUM_BLOCKS) if after[block] != before[block]]
        assert changed == ([2] if byte in covered else [])


@BOTH
@pytest.mark.parametrize("num_bits", [1, 2, 64])
def test_a_thousand_random_flips_are_all_caught(name: ChecksumName, num_bits: int) -> None:
    rng = random.Random(num_bits)
    blocks = pool(torch.float32)[:1].repeat(1001, 1, 1, 1, 1, 1)
    raw = blocks.view(1001, -1).view(torch.uint8).numpy()
    for block in range(1000):
        for bit in rng.sample(range(raw.shape[1] * 8), num_bits):
            raw[block, bit // 8] ^= 1 << (bit % 8)
    *found, intact = part_checksums(blocks, range(1001), whole(blocks), name)
    assert intact not in found


@BOTH
def test_swapped_words_and_zeroes_of_another_length_differ(name: ChecksumName) -> None:
    blocks = pool(torch.float32)
    swapped = blocks.clone()
    flat = swapped.view(NUM_BLOCKS, -1)
    flat[:, [0, 1]] = flat[:, [1, 0]]
    ids = range(NUM_BLOCKS)
    before = part_checksums(blocks, ids, whole(blocks), name)
    assert not set(before) & set(part_checksums(swapped, ids, whole(blocks), name))
    zeros = torch.zeros(1, 8)
    sums = [part_checksums(zeros, [0], ((0, 4 * count),), name)[0] for count in range(1, 9)]
    assert len(set(sums)) == 8


@BOTH
def test_the_order_and_repetition_of_ids_is_kept(name: ChecksumName) -> None:
    blocks = pool(torch.float32)
    a, b = part_checksums(blocks, [1, 4], whole(blocks), name)
    assert part_checksums(blocks, [4, 1, 4], whole(blocks), name) == [b, a, b]
    assert part_checksums(blocks, [], whole(blocks), name) == []


@BOTH
def test_the_order_of_parts_counts_and_where_they_are_cut_does_not(name: ChecksumName) -> None:
    blocks = pool(torch.float32)
    expected = part_checksums(blocks, [2], ((64, 64),), name)
    assert part_checksums(blocks, [2], ((64, 12), (76, 52)), name) == expected
    assert part_checksums(blocks, [2], ((76, 52), (64, 12)), name) != expected


@BOTH
def test_a_head_slice_has_the_checksum_of_the_pool_where_it_is_contiguous(
    name: ChecksumName,
) -> None:
    wide = pool(torch.bfloat16)
    narrow = wide[:, :, :, 1:].contiguous()
    head_bytes = 4 * 8 * 2
    slices = tuple(((2 * segment + 1) * head_bytes, head_bytes) for segment in range(4))
    ids = range(NUM_BLOCKS)
    expected = part_checksums(narrow, ids, whole(narrow), name)
    assert part_checksums(wide, ids, slices, name) == expected


def test_no_verification_reads_nothing_and_gives_zeroes() -> None:
    assert part_checksums(pool(torch.float32), [3, 1], ((0, 4),), "none") == [0, 0]


@pytest.mark.parametrize("name", ["xxh3", "mix64", "none"])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((0, 8), (1020, 8)), "part of 8 bytes at 1020 is not inside a block of 1024 bytes"),
        (((-4, 8),), "part of 8 bytes at -4 is not inside"),
        (((4, 0),), "part of 0 bytes at 4 is not inside"),
        ((), "no part"),
    ],
)
def test_parts_outside_of_a_block_are_refused_by_name(
    name: ChecksumName, parts: Parts, message: str
) -> None:
    with pytest.raises(TransferError, match=message):
        part_checksums(pool(torch.float32), [0], parts, name)


def test_mix64_refuses_what_is_not_of_whole_words() -> None:
    with pytest.raises(TransferError, match="part of 6 bytes at 4 is not of 4-byte words"):
        part_checksums(pool(torch.float32), [0], ((0, 4), (4, 6)), "mix64")
    with pytest.raises(TransferError, match="blocks of 6 bytes are not of 4-byte words"):
        part_checksums(torch.zeros(2, 3, dtype=torch.float16), [0], ((0, 4),), "mix64")


@BOTH
@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_blocks_outside_of_the_pool_are_refused(name: ChecksumName, block_id: int) -> None:
    with pytest.raises(TransferError, match=f"block {block_id} is not in a pool of 5 blocks"):
        part_checksums(pool(torch.float32), [0, block_id], ((0, 8),), name)


class Event:
    """Stands for a CUDA event of work that is done when it is asked for the second time."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._is_asked = False

    def query(self) -> bool:
        if self._is_asked:
            self._blocks.zero_()
        was_asked, self._is_asked = self._is_asked, True
        return was_asked


@pytest.mark.parametrize("name", ["xxh3", "mix64", "none"])
@pytest.mark.parametrize("block_ids", [[], [1]])
def test_what_is_before_the_event_is_in_memory_when_the_sums_are_there(
    name: ChecksumName, block_ids: list[int]
) -> None:
    blocks = pool(torch.float32)
    found = part_checksums(blocks, block_ids, whole(blocks), name, Event(blocks))  # type: ignore[arg-type]
    assert not blocks.any()
    assert found == part_checksums(blocks, block_ids, whole(blocks), name)


@needs_gpu
def test_gpu_memory_has_the_checksums_of_the_twin() -> None:
    blocks = pool(torch.bfloat16)
    parts = ((256, 100), (8, 4), (12, 200))
    expected = part_checksums(blocks, [4, 0, 4], parts, "mix64")
    assert part_checksums(blocks.cuda(), [4, 0, 4], parts, "mix64") == expected


@needs_gpu
def test_gpu_sums_are_of_what_an_event_of_another_stream_promises() -> None:
    blocks = torch.zeros(8, 2**20, dtype=torch.float32, device="cuda")
    expected = part_checksums(torch.ones_like(blocks), range(8), whole(blocks), "mix64")
    part_checksums(blocks, range(8), whole(blocks), "mix64")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles, about a tenth of a second
        blocks.fill_(1.0)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
    assert part_checksums(blocks, range(8), whole(blocks), "mix64", written) == expected
