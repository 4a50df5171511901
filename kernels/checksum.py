"""mix64: the sum over a block's 32-bit words, each mixed with its position."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tandem.kernels.tuned import num_multiprocessors, tuned_config

PIECE_WORDS = 16384  # the unit in which programs share the work, so that few blocks fill a GPU too

# Odd 64-bit constants of splitmix64, as signed numbers like the reference's.
STEP = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MULTIPLIER = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
VECTOR = tl.constexpr(4)  # words of a 16-byte load
LOW_33_BITS = tl.constexpr((1 << 33) - 1)


@dataclass(frozen=True, slots=True)
class ChecksumConfig:
    """Words that a program mixes at a time, its warps, and the limit on programs."""

    tile_words: int
    num_warps: int
    programs_per_sm: int


# One 16-byte load in each thread, of a loop that the compiler unrolls four times. On sm_90 the loop
# takes 12 operations of the integer pipe per word: 64 a clock are 21 bytes, and an H200's memory
# brings 18.5 bytes a clock to each multiprocessor. Tiles of two loads take 15 operations.
DEFAULT = ChecksumConfig(tile_words=512, num_warps=4, programs_per_sm=64)


def candidates() -> Iterator[ChecksumConfig]:
    """Yield the configurations worth measuring."""
    for num_warps in (2, 4, 8):
        for num_loads in (1, 2):
            for programs_per_sm in (16, 32, 64, 128):
                yield ChecksumConfig(128 * num_warps * num_loads, num_warps, programs_per_sm)


def part_table(parts: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Make the kernel's table of the parts of a block, (first word, number of words).

    Int32 `[num_pieces, 3]`: first word, number of words, position of the first word. Positions
    count from 1 through all parts in their order; long parts become several pieces. The host does
    not wait for the copy.
    """
    pieces: list[tuple[int, int, int]] = []
    position = 1
    for first, count in parts:
        pieces.extend(
            (first + start, min(PIECE_WORDS, count - start), position + start)
            for start in range(0, count, PIECE_WORDS)
        )
        position += count
    on_host = torch.tensor(pieces, dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True).view(-1, 3)


def block_checksums(
    words: torch.Tensor,  # int32 [num_blocks, words_per_block]
    block_ids: torch.Tensor,  # int64 [num_ids]
    parts: torch.Tensor,  # int32 [num_pieces, 3], from part_table
    out: torch.Tensor | None = None,  # int64 [num_ids]
    *,
    config: ChecksumConfig | None = None,
) -> torch.Tensor:
    """Compute one signed 64-bit sum per block id, in `out` if it is given.

    Ids and parts must lie inside `words`: they are on the device and are not checked.
    """
    num_ids, num_pieces = len(block_ids), len(parts)
    num_items = num_ids * num_pieces
    assert words.dtype == parts.dtype == torch.int32 and block_ids.dtype == torch.int64
    assert words.stride(1) == 1 and block_ids.is_contiguous() and parts.is_contiguous()
    assert words.shape[1] < 2**31 and num_items < 2**31
    if out is None:
        out = torch.empty(num_ids, dtype=torch.int64, device=words.device)
    assert out.dtype == torch.int64 and out.shape == (num_ids,) and out.is_contiguous()
    out.zero_()
    if num_items == 0:
        return out
    config = config or tuned_config(DEFAULT, "checksum")
    max_programs = num_multiprocessors(words.device) * config.programs_per_sm
    _block_checksums_kernel[(min(num_items, max_programs),)](
        words,
        block_ids,
        parts,
        out,
        words.stride(0),
        num_items,
        num_pieces,
        TILE=config.tile_words,
        num_warps=config.num_warps,
    )
    return out


@triton.jit
def _mix(words, steps):  # type: ignore[no-untyped-def]
    mixed = words.to(tl.int64) + steps
    mixed = (mixed ^ ((mixed >> 31) & LOW_33_BITS)) * MULTIPLIER
    return mixed ^ ((mixed >> 31) & LOW_33_BITS)


# A handoff has any number of blocks: no other build of the kernel for one, or for sixteen.
@triton.jit(do_not_specialize=["num_items", "num_pieces"])  # type: ignore[untyped-decorator]
def _block_checksums_kernel(  # type: ignore[no-untyped-def]
    words,  # [num_blocks, words_per_block]
    block_ids,  # [num_ids]
    pieces,  # [num_pieces, 3]
    out,  # [num_ids], zeroed
    words_stride_block,
    num_items,
    num_pieces,
    TILE: tl.constexpr,
):
    # grid: (num_programs,); an item is one piece of one block, and each program has a run of them.
    # The sum of a block's programs does not depend on their order.
    lanes = tl.arange(0, TILE)
    lane_steps = lanes.to(tl.int64) * STEP
    tile_step = tl.full([], TILE, tl.int64) * STEP
    my_num_items = tl.cdiv(num_items, tl.num_programs(0))
    my_item = tl.program_id(0) * my_num_items
    my_end = tl.minimum(my_item + my_num_items, num_items)
    my_index = my_item // num_pieces
    my_piece = my_item % num_pieces
    sums = tl.zeros([TILE], tl.int64)
    for _ in range(my_item, my_end):
        my_first = tl.load(pieces + my_piece * 3)
        my_count = tl.load(pieces + my_piece * 3 + 1)
        my_position = tl.load(pieces + my_piece * 3 + 2).to(tl.int64)
        # A pool is larger than 2**31 words: block ids, and so what they become, are 64 bits wide.
        my_start = tl.load(block_ids + my_index) * words_stride_block + my_first

        # The body: whole tiles from the first 16-byte boundary on, without a mask, which would
        # split the loads. Steps are added up, as a 64-bit product per word costs a fifth more.
        my_body = (my_start + VECTOR - 1) // VECTOR * VECTOR
        num_head = (my_body - my_start).to(tl.int32)
        num_body = tl.maximum(my_count - num_head, 0) // TILE * TILE
        my_step = (my_position + num_head) * STEP
        for start in range(0, num_body, TILE):
            tile = tl.load(words + my_body + start + lanes)
            sums += _mix(tile, lane_steps + my_step)
            my_step += tile_step

        # The edges: the words in front of the body, then those behind it.
        num_edge = my_count - num_body
        for start in range(0, num_edge, TILE):
            edges = start + lanes
            mask = edges < num_edge
            offsets = edges + tl.where(edges < num_head, 0, num_body)
            tile = tl.load(words + my_start + offsets, mask=mask, other=0)
            sums += tl.where(mask, _mix(tile, (my_position + offsets) * STEP), 0)

        # A block's sum leaves the program once, when the next item is another block's.
        my_item += 1
        my_piece += 1
        if (my_piece == num_pieces) | (my_item == my_end):
            tl.atomic_add(out + my_index, tl.sum(sums), sem="relaxed")
            sums = tl.zeros([TILE], tl.int64)
            my_piece = 0
            my_index += 1
