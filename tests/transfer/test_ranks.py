"""KV between workers of different tensor-parallel widths: the arithmetic, in memory."""

import ctypes
from collections.abc import Iterable
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.transfer.checksum import part_checksums
from tandem.transfer.layout import ChecksumName, KvLayout, RankPair, rank_pairs
from tandem.transfer.transport import Parts

WORDS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.sampled_from([8, 16, 24]),
    block_size=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
widths = st.sampled_from([1, 2, 4, 8])


def whole_block(layout: KvLayout) -> torch.Tensor:
    """[num_layers, 2, num_kv_heads, block_size, head_dim], no two elements of which are equal."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1).to(WORDS[layout.dtype]).view(shape)


def rank_blocks(block: torch.Tensor, tp_size: int) -> list[torch.Tensor]:
    """What each of the ranks holds of a block: an even share of its heads, in order."""
    return [share.contiguous() for share in block.chunk(tp_size, dim=2)]


def move(source: torch.Tensor, theirs: Parts, target: torch.Tensor, ours: Parts) -> None:
    for (begin, length), (to, as_long) in zip(theirs, ours, strict=True):
        assert length == as_long > 0
        assert begin + length <= source.nbytes and to + length <= target.nbytes
        ctypes.memmove(target.data_ptr() + to, source.data_ptr() + begin, length)


def taken(heads: Iterable[int], rank: int, heads_per_rank: int) -> list[int]:
    return [rank * heads_per_rank + head for head in heads]


@given(st.integers(1, 5), widths, widths)
def test_every_head_goes_over_one_stream_from_the_rank_that_has_it_to_the_rank_that_wants_it(
    multiple: int, prefill_tp: int, decode_tp: int
) -> None:
    num_heads = multiple * max(prefill_tp, decode_tp)
    per_prefill, per_decode = num_heads // prefill_tp, num_heads // decode_tp
    heads: list[int] = []
    for ranks in rank_pairs(num_heads, prefill_tp, decode_tp):
        sent = taken(ranks.prefill_heads, ranks.prefill_rank, per_prefill)
        assert sent == taken(ranks.decode_heads, ranks.decode_rank, per_decode)
        assert 0 <= ranks.prefill_heads.start < ranks.prefill_heads.stop <= per_prefill
        assert 0 <= ranks.decode_heads.start < ranks.decode_heads.stop <= per_decode
        heads += sent
    assert heads == list(range(num_heads))


@given(layouts, widths, widths, st.data())
def test_spans_of_layers_of_every_stream_put_each_head_of_each_layer_in_its_place_once(
    layout: KvLayout, prefill_tp: int, decode_tp: int, data: st.DataObject
) -> None:
    block = whole_block(layout)
    source = rank_blocks(block, prefill_tp)
    target = [torch.zeros_like(share) for share in rank_blocks(block, decode_tp)]
    num_moved = 0
    ends = data.draw(st.sets(st.integers(1, layout.num_layers))) | {layout.num_layers}
    boundaries = sorted(ends)
    for ranks in rank_pairs(layout.num_kv_heads, prefill_tp, decode_tp):
        for begin, end in zip([0, *boundaries], boundaries, strict=False):
            theirs, ours = cut(layout, ranks, (prefill_tp, decode_tp), boundaries, (begin, end))
            before = target[ranks.decode_rank].clone()
            move(source[ranks.prefill_rank], theirs, target[ranks.decode_rank], ours)
            changed = target[ranks.decode_rank] != before
            assert not changed[:begin].any() and not changed[end:].any()
            num_moved += int(changed.sum())
    assert num_moved == block.numel()
    assert torch.equal(torch.cat(target, dim=2), block)


def cut(
    layout: KvLayout,
    ranks: RankPair,
    tp_sizes: tuple[int, int],
    boundaries: list[int],
    layers: tuple[int, int],
) -> tuple[Parts, Parts]:
    """The pieces of both sides' blocks, as the tables of descriptors are made of them."""
    p, d = (replace(layout, tp_size=tp_size) for tp_size in tp_sizes)
    if p.tp_size == d.tp_size:
        index = boundaries.index(layers[1])
        part = p.layer_parts(boundaries)[index : index + 1]
        return part, part
    pieces = slice(2 * layers[0], 2 * layers[1])
    return p.head_parts(ranks.prefill_heads)[pieces], d.head_parts(ranks.decode_heads)[pieces]


@given(layouts, widths, widths, st.data(), st.sampled_from(["xxh3", "mix64"]))
def test_both_ends_of_a_stream_checksum_the_same_bytes_in_the_same_order(
    layout: KvLayout, prefill_tp: int, decode_tp: int, data: st.DataObject, name: ChecksumName
) -> None:
    end = data.draw(st.integers(1, layout.num_layers))
    layers = range(data.draw(st.integers(0, end - 1)), end)
    block = whole_block(layout)
    source, target = rank_blocks(block, prefill_tp), rank_blocks(block, decode_tp)
    p, d = replace(layout, tp_size=prefill_tp), replace(layout, tp_size=decode_tp)
    for ranks in rank_pairs(layout.num_kv_heads, prefill_tp, decode_tp):
        ours = p.span_parts(ranks.prefill_heads, layers)
        theirs = d.span_parts(ranks.decode_heads, layers)
        pool = source[ranks.prefill_rank][None], target[ranks.decode_rank][None]
        sums = part_checksums(pool[0], [0], ours, name)
        assert part_checksums(pool[1], [0], theirs, name) == sums
        offset, _ = theirs[0]
        pool[1].view(-1).view(torch.uint8)[offset] ^= 1
        assert part_checksums(pool[1], [0], theirs, name) != sums
        pool[1].view(-1).view(torch.uint8)[offset] ^= 1
