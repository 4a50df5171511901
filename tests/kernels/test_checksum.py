"""mix64: the kernel and its reference against a definition in plain Python."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.kernels import checksum
from tandem.kernels.checksum import ChecksumConfig
from tandem.transfer.mix64 import mix64
from tests.kernels.tolerance import launchers, unlike

Parts = tuple[tuple[int, int], ...]
Sums = Callable[..., list[int]]

ALL_64_BITS = (1 << 64) - 1


def by_kernel(
    words: torch.Tensor, block_ids: list[int], parts: Parts, config: ChecksumConfig | None = None
) -> list[int]:
    ids = torch.tensor(block_ids, dtype=torch.int64, device=words.device)
    table = checksum.part_table(parts, words.device)
    sums = checksum.block_checksums(words, ids, table, config=config).tolist()
    return [value & ALL_64_BITS for value in sums]


def by_twin(
    words: torch.Tensor, block_ids: list[int], parts: Parts, config: ChecksumConfig | None = None
) -> list[int]:
    ids = torch.tensor(block_ids, dtype=torch.int64, device=words.device)
    return [value & ALL_64_BITS for value in mix64(words, ids, parts).tolist()]


def by_definition(words: torch.Tensor, block_ids: list[int], parts: Parts) -> list[int]:
    sums = []
    for block in words[block_ids].tolist():
        covered = [word for first, count in parts for word in block[first : first + count]]
        total = 0
        for position, word in enumerate(covered, 1):
            mixed = (word + position * 0x9E3779B97F4A7C15) & ALL_64_BITS
            mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & ALL_64_BITS
            total += mixed ^ (mixed >> 31)
        sums.append(total & ALL_64_BITS)
    return sums


def random_words(num_blocks: int, words_per_block: int, device: str) -> torch.Tensor:
    """Of all 32 bits: about half of the words have the sign bit set."""
    generator = torch.Generator().manual_seed(words_per_block)
    shape = (num_blocks, words_per_block)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    return words.to(torch.int32).to(device)


BOTH = launchers("sums", by_kernel, by_twin)


@BOTH
@pytest.mark.parametrize(
    ("words_per_block", "block_ids", "parts"),
    [
        pytest.param(1, [0], ((0, 1),), id="one word of one block"),
        pytest.param(3, [2, 0, 1], ((0, 3),), id="less than one load"),
        pytest.param(67, [1, 1, 0, 1], ((0, 67),), id="odd rows, repeated ids"),
        pytest.param(64, [], ((0, 64),), id="no block"),
        pytest.param(64, [2], ((16, 32),), id="whole tiles"),
        pytest.param(101, [0, 2], ((3, 97),), id="unaligned at both ends"),
        pytest.param(96, [1, 0], ((7, 1), (8, 40), (49, 2), (52, 44)), id="several parts"),
        pytest.param(96, [1, 0], ((52, 44), (8, 40), (7, 1)), id="in another order"),
        pytest.param(96, [1, 0], ((8, 40), (8, 40), (20, 4)), id="one part twice"),
    ],
)
@pytest.mark.parametrize(("piece", "programs_per_sm"), [(37, 10**6), (5, 1)])
def test_the_sum_is_the_defined_one_however_the_work_is_divided(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    sums: Sums,
    words_per_block: int,
    block_ids: list[int],
    parts: Parts,
    piece: int,
    programs_per_sm: int,
) -> None:
    monkeypatch.setattr(checksum, "PIECE_WORDS", piece)
    config = ChecksumConfig(tile_words=16, num_warps=1, programs_per_sm=programs_per_sm)
    words = random_words(3, words_per_block, device)
    assert sums(words, block_ids, parts, config) == by_definition(words, block_ids, parts)


def test_every_candidate_gives_the_same_sum(device: str) -> None:
    words = random_words(2, 5000, device)
    parts = ((1, 4999),)
    for config in unlike(checksum.candidates()):
        assert by_kernel(words, [1], parts, config) == by_twin(words, [1], parts)


def test_the_sum_is_the_defined_one_at_the_real_sizes(device: str) -> None:
    words = random_words(2, checksum.PIECE_WORDS + 3 * checksum.DEFAULT.tile_words + 5, device)
    parts = ((2, 600), (700, words.shape[1] - 700))
    assert by_kernel(words, [1, 0], parts) == by_definition(words, [1, 0], parts)
    assert by_twin(words, [1, 0], parts) == by_definition(words, [1, 0], parts)


@pytest.mark.parametrize("value", [0, -1, -(2**31), 2**31 - 1])
def test_words_of_one_value_have_sums_that_tell_their_number(device: str, value: int) -> None:
    words = torch.full((1, 40), value, dtype=torch.int32, device=device)
    counts = (1, 2, 15, 16, 17, 40)
    found = [by_kernel(words, [0], ((0, count),))[0] for count in counts]
    assert found == [by_definition(words, [0], ((0, count),))[0] for count in counts]
    assert len(set(found)) == len(counts)


def test_sums_overwrite_what_was_in_the_given_tensor(device: str) -> None:
    words = random_words(4, 24, device)
    ids = torch.tensor([3, 1], device=device)
    table = checksum.part_table(((0, 24),), words.device)
    out = torch.full((2,), -7, dtype=torch.int64, device=device)
    assert checksum.block_checksums(words, ids, table, out) is out
    assert [value & ALL_64_BITS for value in out.tolist()] == by_twin(words, [3, 1], ((0, 24),))


def test_blocks_further_than_two_to_the_31_words_into_the_pool_are_read(tmp_path: Path) -> None:
    # A sparse file: only what is touched takes memory.
    num_words = 2**31 + 2**10
    words = torch.from_file(str(tmp_path / "pool"), shared=True, size=num_words, dtype=torch.int32)
    words = words.view(-1, 64)
    words[-1] = random_words(1, 64, "cpu")[0]
    last = len(words) - 1
    expected = by_definition(words[-1:], [0], ((0, 64),)) + by_definition(words, [1], ((0, 64),))
    assert by_twin(words, [last, 1], ((0, 64),)) == expected
    if not torch.cuda.is_available():
        assert by_kernel(words, [last, 1], ((0, 64),)) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 9 GiB free")
def test_a_gpu_pool_of_more_than_two_to_the_31_words_is_read_to_its_end() -> None:
    words = torch.zeros(2**31 // 2**19 + 2, 2**19, dtype=torch.int32, device="cuda")
    words[-1] = random_words(1, 2**19, "cuda")[0]
    parts = ((3, 2**19 - 8),)
    ids = [len(words) - 1, 0]
    assert by_kernel(words, ids, parts) == by_twin(words, ids, parts)
